"""Study of what quantised rollouts cost, alone and together with lag."""
