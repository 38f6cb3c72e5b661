"""Where engines are: from fixed lists, from DNS, or from a Kubernetes cluster's EndpointSlices."""
