"""Weight sync: how the learner's weights reach every replica, in the background and by deadlines.

The learner copies a version into shared memory and goes on (`publisher_client`). The publisher beside it
broadcasts the newest version to the receivers, one process beside each engine; the coordinator
decides who takes part and when; each replica swaps by itself (`link`, `staging`).
"""
