"""Callbacks for training loops of other libraries. Each module imports its library, and nothing imports the modules."""
