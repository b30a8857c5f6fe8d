"""Checks that anybody can run on data of their own: does it start, and does it resume exactly?"""
