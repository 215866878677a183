"""Tasks that can be made on the spot: data here, a warm-started model in `services/trainer/make_model.py`."""
