"""cwfed: personalised federated learning around class-wise federated averaging."""
