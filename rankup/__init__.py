"""Starts PyTorch jobs anywhere and keeps them alive. It knows nothing about models or data."""
