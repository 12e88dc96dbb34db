"""What a user's training loop says to the compiler beside a plan: gradients averaged, steps in the backward, modules in
parts.
"""
