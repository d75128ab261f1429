"""The only door to other clients: messages, inboxes, exchanges."""
