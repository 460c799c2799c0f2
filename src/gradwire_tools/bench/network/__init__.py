"""The network between ranks: `doctor --ranks`, `probe`, `bench collectives`, `bench transports`."""
