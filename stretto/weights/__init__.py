"""The weights' way out of the trainer and into the replicas: what both clients of the relay and the relay itself share.

layout      which byte of the arena belongs to which tensor, and what digest proves it   (pure)
publisher   blocking, for the trainer's thread
subscriber  asyncio, for the rollout service
shm         mapping a relay's slot that was handed over as a file descriptor
stream      the grpc backend's messages, without protobuf's copies
"""
