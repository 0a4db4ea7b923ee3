"""The parts of `rl.py`: each measures one thing, shows it as a table, and says what is wrong with it."""
