export PYTHONPATH=$PWD/gpu_deps:$PWD PYTHONUNBUFFERED=1
(timeout 200 python3 -m pytest -q -m gpu tests/kernels/test_fp4_linear.py tests/kernels/test_nf4_linear.py > $OUT/t1.log 2>&1) &
(timeout 200 python3 -m pytest -q -m gpu tests/kernels tests/quant --ignore tests/kernels/test_fp4_linear.py --ignore tests/kernels/test_nf4_linear.py > $OUT/t2.log 2>&1) &
(timeout 200 python3 -m pytest -q -m gpu tests/model > $OUT/t3.log 2>&1) &
(timeout 200 python3 -m pytest -q -m gpu tests/rl tests/engine > $OUT/t4.log 2>&1) &
wait
timeout 60 python3 -m pytest -q -m gpu tests/bench/test_step.py > $OUT/t5.log 2>&1
for i in 1 2 3 4 5; do echo "== $i"; grep -E "^(FAILED|ERROR)|^E  " $OUT/t$i.log | cut -c1-200 | head -20; tail -2 $OUT/t$i.log | cut -c1-200; done
