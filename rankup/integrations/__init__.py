"""Callbacks for the trainers of other libraries. Each module imports its library, and rankup imports none of them."""
