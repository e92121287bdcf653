export PYTHONPATH=$PWD/gpu_deps:$PWD PYTHONUNBUFFERED=1
(timeout 260 python3 -m pytest -q -m gpu tests/kernels/test_fp4_linear.py -x > $OUT/t1.log 2>&1; tail -8 $OUT/t1.log > $OUT/t1.tail) &
(timeout 260 python3 -m pytest -q -m gpu tests/kernels tests/quant tests/bench --ignore tests/kernels/test_fp4_linear.py > $OUT/t2.log 2>&1; tail -8 $OUT/t2.log > $OUT/t2.tail) &
(timeout 260 python3 -m pytest -q -m gpu tests/engine tests/model > $OUT/t3.log 2>&1; tail -8 $OUT/t3.log > $OUT/t3.tail) &
(timeout 260 python3 -m pytest -q -m gpu tests/rl tests/export tests/evaluation tests/integrations > $OUT/t4.log 2>&1; tail -8 $OUT/t4.log > $OUT/t4.tail; timeout 100 python3 -m pytest -q tests/kernels/test_expand.py >> $OUT/t4.log 2>&1; tail -2 $OUT/t4.log >> $OUT/t4.tail) &
wait
for i in 1 2 3 4; do echo "== $i"; grep -E "^(FAILED|ERROR)|^E  " $OUT/t$i.log | cut -c1-220 | head -30; cat $OUT/t$i.tail; done
