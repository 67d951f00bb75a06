"""Audit the books of an engine: blocks, tables and counts must agree with one another, whatever has happened."""
# ruff: noqa: SLF001 -- an audit reads private members

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ballast_engine.engine import BallastEngine
from ballast_engine.kv import BlockPool
from ballast_engine.resident_kv import ResidentKv
from ballast_policy.request import Phase


class IntegrityError(Exception):
    """Blocks, slots or counters do not balance: a defect of the engine."""


def check_integrity(engine: BallastEngine) -> None:
    """Compare all records of an engine between two steps, on its thread; raise IntegrityError if they differ."""
    scheduler, host = engine._scheduler, engine._scheduler.host
    _check_kv(scheduler.kv)
    if imbalance := host.imbalance():
        raise IntegrityError(imbalance)
    waiting = {request.seq for request in host.backlog}
    expected = {seq for seq, sequence in scheduler.live.items() if sequence.request.phase is Phase.WAITING}
    if waiting != expected or host.residents.keys() != scheduler.live.keys() - expected:
        raise IntegrityError(f"the backlog holds {sorted(waiting)}, but {sorted(expected)} wait")
    if set(engine._by_id) != {sequence.request_id for sequence in scheduler.live.values()}:
        raise IntegrityError("the requests by id differ from the requests by number")


def _check_kv(kv: ResidentKv) -> None:
    residents, rows = kv._residents, kv.tables._table
    check_pool(kv.pool, {seq: sequence.blocks for seq, sequence in residents.items()})
    unused = 0
    for sequence in kv.live.values():
        request, blocks = sequence.request, sequence.blocks
        if (request.phase is not Phase.WAITING) != (request.seq in residents):
            raise IntegrityError(f"request {request.seq} is {request.phase.name}, but the residents say otherwise")
        if request.phase is Phase.WAITING:
            if request.num_blocks or request.num_computed or blocks or sequence.row != -1:
                raise IntegrityError(f"request {request.seq} waits and holds KV")
            continue
        row = rows[sequence.row]
        if row[: len(blocks)].tolist() != blocks or row[len(blocks) :].any():
            raise IntegrityError(f"the table row of request {request.seq} differs from its blocks")
        capacity = request.num_blocks * kv.pool.block_tokens
        if request.num_blocks != len(blocks) or not 0 <= request.num_computed <= capacity:
            raise IntegrityError(f"request {request.seq} computed {request.num_computed} of {capacity} positions")
        unused += capacity - request.num_computed
    if unused != kv.num_unused:
        raise IntegrityError(f"{kv.num_unused} unused positions are counted, {unused} found")
    if (num_rows := len(rows) - len(kv.tables._unused)) != len(residents):
        raise IntegrityError(f"{num_rows} table rows for {len(residents)} residents")


def check_pool(pool: BlockPool, tables: Mapping[int, Sequence[int]]) -> None:
    """Compare the counts of a pool with the blocks of every holder; raise IntegrityError if they differ."""
    holders: dict[int, list[int]] = {}
    for holder, blocks in tables.items():
        if len(set(blocks)) != len(blocks):
            raise IntegrityError(f"request {holder} holds a block twice: {blocks}")
        for block in blocks:
            holders.setdefault(block, []).append(holder)
    free, idle = set(pool._free), set(pool._idle)
    if len(free) != len(pool._free) or free & idle:
        raise IntegrityError("a block is in the free list twice")
    for block in range(pool.num_blocks):
        held, digest = holders.get(block, []), pool._digest[block]
        if pool._count[block] != len(held):
            raise IntegrityError(f"block {block} counts {pool._count[block]} holders, but {held} hold it")
        if bool(held) == (block in free or block in idle):
            raise IntegrityError(f"block {block} is {'free and held' if held else 'neither free nor held'}")
        if (block in idle and digest is None) or (block in free and digest is not None):
            raise IntegrityError(f"block {block} is in the wrong free list")
        if digest is not None and pool._known.get(digest) != block:
            raise IntegrityError(f"block {block} has a digest of another block")
    if len(pool._known) != sum(digest is not None for digest in pool._digest):
        raise IntegrityError("the prefix cache knows digests that no block has")
    private = {holder: sum(len(holders[b]) == 1 for b in blocks) for holder, blocks in tables.items() if blocks}
    if private != {holder: num for holder, num in pool.num_private.items() if num or tables.get(holder)}:
        raise IntegrityError(f"private blocks are {pool.num_private}, but the tables say {private}")
