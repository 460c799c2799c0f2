"""What `gradwire bench train --sharded` adds: FSDP2 with quantised weights and gradients."""
