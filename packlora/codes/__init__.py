"""Base models whose linear layers are quantised: their codes, how they are loaded, and PEFT's layers over them. The rest of the
package finds this by name: see packlora/form.py."""
