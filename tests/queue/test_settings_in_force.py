"""Which of the settings that several resources write is in force."""

from __future__ import annotations

import pytest

from ballast_queue.redis_store import Queue
from ballast_queue.settings import UNCONFIGURED, InForce, QueueSettings


def test_newer_settings_of_a_resource_win(queue):
    def put(created, generation):
        return queue.settings.apply(QueueSettings(created=created, generation=generation, max_attempts=generation + 1))

    put_in_force = [put(10, 3), put(10, 2), put(9, 99), put(10, 4), put(11, 1), put(11, 1)]

    assert put_in_force == [True, False, False, True, True, True]
    assert queue.settings.read().max_attempts == 2


@pytest.mark.parametrize("part", ["", "/part"], ids=["namespace and name", "a part of a name"])
def test_the_settings_of_a_queue_are_those_of_its_own_resource_then_of_the_oldest(valkey, queue_name, part):
    queue = Queue.connect(valkey.url, f"{queue_name}{part}")
    namespace = queue.name.partition("/")[0]
    put = [
        queue.settings.apply(QueueSettings(owner=owner, created=created))
        for owner, created in [
            ("other/m", 5),
            ("other/n", 4),
            ("other/of the same age", 4),
            ("other/newer", 9),
            (f"{namespace}/llm", 8),
            (f"{namespace}/newer", 9),
            (queue.name, 10),
            (f"{namespace}/llm", 8),
            ("other/m", 99),
        ]
    ]

    assert put == [True, True, False, False, True, False, True, False, False]
    assert queue.settings.read().owner == queue.name
    queue.close()


def test_settings_give_way_if_nobody_renews_them(queue, desk):
    mine, other = QueueSettings(owner=queue.name, created=1), QueueSettings(owner="other/m", created=2)
    queue.settings.apply(mine)
    before = queue.settings.apply(other)
    desk.raw.hset(queue.store.keys.settings, "renewed", "1")
    queue.settings.renew(queue.name)
    renewed = queue.settings.apply(other)
    desk.raw.hset(queue.store.keys.settings, "renewed", "1")
    queue.settings.renew("other/m")  # it renews its own settings only
    gone = queue.settings.apply(other)

    assert (before, renewed, gone) == (False, False, True)
    assert queue.settings.renew(queue.name) == InForce("other/m", 2, 0)
    assert queue.settings.apply(mine), "the resource that the queue is named after returns"


def test_older_settings_of_a_resource_win_once_nobody_applies_the_newer_ones(queue, desk):
    """As after a restore of the cluster from a backup: the resource begins again at an older generation."""
    older, newer = (QueueSettings(owner=queue.name, created=10.5, generation=number) for number in (6, 7))
    queue.settings.apply(newer)
    before = queue.settings.apply(older)
    desk.raw.hset(queue.store.keys.settings, "applied", "1")
    in_force = queue.settings.renew(queue.name)  # the operator renews the settings of a generation that it has lost
    after = queue.settings.apply(older)
    again = [queue.settings.apply(newer), queue.settings.apply(older)]

    assert (before, after, again) == (False, True, [True, False])
    assert in_force == InForce(queue.name, 10.5, 7)

    desk.raw.hdel(queue.store.keys.settings, "applied")  # as an older version of Ballast wrote them
    assert [queue.settings.apply(older) for _ in range(2)] == [False, False]
    desk.raw.hset(queue.store.keys.settings, "applied", "1")
    assert queue.settings.apply(older)


def test_settings_are_removed_by_the_name_of_their_owner_only(queue):
    queue.settings.apply(QueueSettings(owner=queue.name, max_attempts=9))
    dropped = [queue.settings.drop("other/m"), queue.settings.drop(queue.name), queue.settings.drop(queue.name)]

    assert dropped == [False, True, False]
    assert queue.settings.read() == UNCONFIGURED
