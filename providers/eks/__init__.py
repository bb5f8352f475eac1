"""EKS: Kubernetes on Amazon's machines. A network and two roles in one CloudFormation stack, managed node groups on it."""
