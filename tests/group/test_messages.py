"""The rows of messages between rank 0 and the others, in a store in memory."""

import threading

from torch.distributed import HashStore

from train.group import keys
from train.group.messages import GAP_S, Inbox, post, say


def test_messages_come_in_their_order_and_once():
    store = HashStore()
    inbox = Inbox(store)
    post(store, {"n": 1})
    post(store, {"n": 2})
    assert inbox.collect(60) == [{"n": 1}, {"n": 2}]
    post(store, {"n": 3})
    assert inbox.collect(60) == [{"n": 3}]
    assert inbox.collect(0.01) == []


def test_rank_0_is_woken_by_a_message():
    store = HashStore()
    inbox = Inbox(store)
    sender = threading.Timer(0.1, post, (store, {"n": 1}))
    sender.start()
    assert inbox.collect(60) == [{"n": 1}]
    sender.join()


def test_a_sender_that_dies_half_way_holds_nobody():
    store = HashStore()
    inbox = Inbox(store)
    lost = store.add(keys.MESSAGES, 1)  # and then the process was killed
    post(store, {"n": 2})
    assert inbox.collect(GAP_S) == [{"n": 2}]
    post(store, {"n": 3})
    assert inbox.collect(60) == [{"n": 3}]
    store.set(keys.message(lost), '{"n": 1}')  # or it was only slow
    assert inbox.collect(60) == [{"n": 1}]


def test_who_reads_the_counter_finds_the_word():
    store = HashStore()
    say(store, 1, {"call": 1})
    assert store.add(keys.WORDS, 0) == 1
    assert store.get(keys.word(1)) == b'{"call": 1}'
