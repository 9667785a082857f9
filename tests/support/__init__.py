"""What several tests share: drawn layouts and shapes, ranks simulated in one process."""
