"""What is sent between ranks, on which communicator and which stream."""
