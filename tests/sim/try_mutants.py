import sys, time
from tests.sim.mutants_around import MUTANTS_AROUND
from tests.sim.run import run, SimulationFailed
names = sys.argv[1:] or list(MUTANTS_AROUND)
for n in names:
    t=time.monotonic()
    for seed in range(150):
        try: run(seed, 2000, MUTANTS_AROUND[n])
        except SimulationFailed as e:
            print(f"{n}: seed {seed} {time.monotonic()-t:.1f}s {str(e)[:150]}", flush=True); break
        except Exception as e:
            print(f"{n}: ERROR {seed} {e!r}", flush=True); break
    else: print(n, "NOT FOUND", time.monotonic()-t, flush=True)
