"""A library that starts a thread while it is imported."""

from tests.rigs.start_facts import start_thread

start_thread()
