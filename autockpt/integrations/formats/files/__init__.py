"""Single-file formats: torch.save and safetensors."""
