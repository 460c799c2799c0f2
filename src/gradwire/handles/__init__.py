"""`gw.attach`: a handle on a DDP or FSDP2 module, and the passes of its gradients and weights."""
