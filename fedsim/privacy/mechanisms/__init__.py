"""One file a mechanism: its exact privacy curve, calibration and experiment."""
