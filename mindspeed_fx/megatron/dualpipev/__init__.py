"""``--schedules-method dualpipev``: a rank of the pipeline holds two chunks of the model in V shape.

    rank    0  1  2  3
    chunk 0 0  1  2  3
    chunk 1 7  6  5  4      (stages; the last one lies on the first rank)

placement: which layers a rank's chunks have; messages: what goes between ranks; schedule: what runs when.
"""
