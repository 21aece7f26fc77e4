"""The group: how a rank connects to the other ranks of its membership, and how it learns that one of them is lost."""
