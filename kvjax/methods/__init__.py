"""The methods: policies, each with the structures that only it uses."""
