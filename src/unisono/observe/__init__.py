"""Seeing inside: what ranks are in, what they wait for, what a job did."""
