"""Ten questions about a compiled model, each answered from what was recorded of its graphs.

    base        what a question is given and what an answer is
    rewrites    which layers were left, what a pass changed, what is approximated
    step        time and memory of the step: peak, exposed collectives, step 1
    forms       the step otherwise: another level, without a family, another batch
    ranks       what one rank does differently
    ask         the list of questions, and finding the one that is meant

The command, ``Report.ask`` and the page give the same answers.
"""
