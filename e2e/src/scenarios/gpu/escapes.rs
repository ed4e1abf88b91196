//! Containers that try to escape from their share on a real GPU.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{
    bench::{Bench, START},
    pods::GpuPod,
};
use crate::harness::Harness;

/// Time in which an escape is detected and ended.
const DETECTED: Duration = Duration::from_secs(15);

/// Asks the driver for the GPU's memory through a handle that ignores preloaded libraries.
const DEEPBIND: &str = r#"
import ctypes, os
driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
device, size = ctypes.c_int(), ctypes.c_size_t()
assert driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0
print("memory", size.value >> 20, flush=True)
"#;

/// Runs a program with a copy of the loader that reads no /etc/ld.so.preload.
const PATCHED_LOADER: &str = r#"$PYTHON -c '
import os
loader = open("/lib64/ld-linux-x86-64.so.2", "rb").read()
open("/tmp/loader", "wb").write(loader.replace(b"/etc/ld.so.preload", b"/etc/ld.so.nothing"))
os.chmod("/tmp/loader", 0o755)'
(while :; do echo 1; done) | /tmp/loader $PYTHON /e2e/training.py matmul 2>&1"#;

pub(super) async fn run(harness: &Harness) -> Result<()> {
    let bench = Bench::start(harness, &["--on-escape=kill"]).await?;
    let python = bench.host.python.clone();
    let settings = "export LD_PRELOAD= TESSERA_GRANT=/tmp LD_LIBRARY_PATH=/usr/local/nvidia/lib64";
    let script = format!("{settings}; $PYTHON -c '{DEEPBIND}' 2>&1; exec sleep 100000");
    bench.run(&GpuPod::python("prevented", &script, &python)?.share(5, 40)).await?;
    let memory = |line: &str| line.strip_prefix("memory ")?.parse::<u64>().ok();
    let seen_mib = bench.wait_for_line("prevented", "the memory it sees", START, memory).await?;
    ensure!(seen_mib == 40 * 256, "a handle with RTLD_DEEPBIND shows {seen_mib} MiB");
    harness.note("prevented: other variables, and the driver opened with RTLD_DEEPBIND");

    bench.run(&GpuPod::rates("neighbour", "matmul", &python)?.share(70, 40)).await?;
    bench.wait_until_ready(&["neighbour"]).await?;
    let before = bench.next_rates(&["neighbour"], 3).await?[0];
    bench.run(&GpuPod::python("escaped", PATCHED_LOADER, &python)?.share(5, 40)).await?;
    bench.wait_until_ready(&["escaped"]).await?;
    let begin = Instant::now();
    let message = bench.event("escaped", "GpuShareEscaped", DETECTED).await?;
    let detected = begin.elapsed();
    ensure!(message.contains("without libtessera.so"), "{message}");
    harness.note(&format!("a patched loader: {message} ({detected:.1?} after it was ready)"));
    harness
        .wait_for("the escaped process to be killed", DETECTED, async || {
            Ok(bench.on_gpu("escaped").await?.is_empty().then_some(()))
        })
        .await?;
    let after = bench.next_rates(&["neighbour"], 3).await?[0];
    harness.note(&format!(
        "killed {:.1?} after it was ready; its neighbour has {:.0} % of its former rate",
        begin.elapsed(),
        100.0 * after / before
    ));
    ensure!(after >= 0.97 * before, "the neighbour had {before:.1} and has {after:.1} steps per second");
    bench.wait_until_empty().await
}
