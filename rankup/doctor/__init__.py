"""The checks of the doctor: is this machine, and this group of machines, fit to train?"""
