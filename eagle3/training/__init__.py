"""Training of drafts: batches, training-time test, losses, and a trainer that resumes exactly."""
