"""The only door to other clients: messages, inboxes and exchanges."""
