"""Prefix cache of vLLM's engine core over a change of weights.

A prompt is salted with the version that is served when it is sent, and may wait in the core through a swap.
With `rollout.kv_cache: keep` vLLM 0.32 keeps the index of cached blocks then: such a request began on keys
and values of the older weights (log-probs off by 2.9). Its own reset refuses while a request holds blocks.
Invariant: a core that resumes finds no block that was computed before.
"""

from __future__ import annotations

from rollout_service.engine.vllm.objects import BlockPool, Scheduler

MARK = "_forgets_prefixes"


def forget_at_resumption() -> None:
    """Have this process's engine core forget its index of prefixes whenever it resumes; repeatable."""
    from vllm.v1.core.sched import scheduler
    from vllm.v1.core.sched.interface import PauseState

    kind = scheduler.Scheduler
    if hasattr(kind, MARK):
        return
    set_state = kind.set_pause_state

    def set_pause_state(self: Scheduler, pause_state: object) -> None:
        if pause_state is PauseState.UNPAUSED:
            _forget(self.kv_cache_manager.block_pool)
        set_state(self, pause_state)

    kind.set_pause_state = set_pause_state
    setattr(kind, MARK, True)


def _forget(pool: BlockPool) -> None:
    """Take every block out of the index; those that running requests hold stay theirs."""
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
