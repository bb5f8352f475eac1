"""What the engines of machines without Kubernetes share: `node` supervises the ranks on each machine."""
