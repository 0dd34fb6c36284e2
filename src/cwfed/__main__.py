"""python -m cwfed"""

from cwfed.cli import main

main()
