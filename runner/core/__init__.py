"""What every package may use: it imports nothing of ours."""
