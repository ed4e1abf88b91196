//! A container on a simulated GPU: a grant, and programs under the library.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use tempfile::TempDir;
use tessera_limits::memory_account::AccountSnapshot;
use tessera_limits::{Bytes, Control, GpuLimit, GpuSlot, GrantLimits, UuidBytes, files, futex};

/// UUID of the first simulated GPU. Further GPUs have a higher last byte.
const UUID: [u8; 16] = *b"simulated-gpu-00";

/// MiB that a context takes in the simulated driver.
pub(crate) const CONTEXT: u64 = 500;

/// The built library, simulated driver and programs.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) library: PathBuf,
    drivers: PathBuf,
    tenant: PathBuf,
    monitor: PathBuf,
    /// The program that tries to reach the driver without the library.
    pub(crate) escape: PathBuf,
    /// Another library to preload.
    pub(crate) preloaded: PathBuf,
    /// The program that measures on a real GPU.
    pub(crate) work: PathBuf,
}

/// A container with a grant on a GPU of its own.
#[derive(Debug)]
pub(crate) struct Container {
    folder: TempDir,
    gpu: PathBuf,
    /// The order in which the container's programs see the GPUs.
    order: &'static str,
}

/// A program in a container that executes one command per line.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub(crate) child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Built {
    /// Builds everything once per run, in a separate target directory: the cargo that runs the
    /// tests may lock the usual one.
    pub(crate) fn get() -> &'static Self {
        static BUILT: OnceLock<Built> = OnceLock::new();
        BUILT.get_or_init(|| {
            let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
            let target = crate_folder.join("../../target/under-test");
            let built = Command::new(env!("CARGO"))
                .args(["build", "--quiet", "--offline", "--profile", "interpose"])
                .args(["-p", "tessera-interpose", "-p", "tessera-simulated-driver", "-p", "tessera-arbiter"])
                .args(["--target-dir".as_ref(), target.as_os_str()])
                .current_dir(crate_folder)
                .status()
                .unwrap();
            assert!(built.success());
            let (built, drivers) = (target.join("interpose"), target.join("drivers"));
            std::fs::create_dir_all(&drivers).unwrap();
            for name in ["libcuda.so", "libcuda.so.1"] {
                let _ = std::fs::remove_file(drivers.join(name));
                std::os::unix::fs::symlink(built.join("libsimulated_driver.so"), drivers.join(name)).unwrap();
            }
            // NVML is a separate file, because a process may load it without the driver.
            let _ = std::fs::remove_file(drivers.join("libnvidia-ml.so.1"));
            std::fs::copy(built.join("libsimulated_driver.so"), drivers.join("libnvidia-ml.so.1")).unwrap();
            let parts = target.join("escape-parts");
            std::fs::create_dir_all(&parts).unwrap();
            let compile_as = |program: PathBuf, source: &str, options: &[&str]| {
                let source = crate_folder.join(source);
                let new = program.with_extension(std::process::id().to_string());
                let compiled = Command::new("cc")
                    .args(["-O1", "-w", "-o"])
                    .args([&new, &source])
                    .args(["-L".as_ref(), drivers.as_os_str(), "-L".as_ref(), parts.as_os_str()])
                    .args(options)
                    .status()
                    .unwrap();
                assert!(compiled.success(), "{}", source.display());
                // Other tests may be running the previous file.
                std::fs::rename(new, &program).unwrap();
                program
            };
            let compile = |source: &str, options: &[&str]| {
                compile_as(target.join(Path::new(source).file_stem().unwrap()), source, options)
            };
            let shared = ["-shared", "-fPIC", "-lcuda", "-ldl"];
            let behind = [&shared[..], &["-Wl,-soname,libbehind.so"]].concat();
            compile_as(parts.join("libbehind.so"), "tests/plugin.c", &behind);
            compile_as(parts.join("plugin.so"), "tests/plugin.c", &shared);
            std::fs::copy(built.join("libsimulated_driver.so"), parts.join("driver-copy.so")).unwrap();
            let run_path = "-Wl,--enable-new-dtags,-rpath,$ORIGIN/escape-parts";
            Self {
                library: built.join("libtessera.so"),
                tenant: compile("tests/tenant.c", &["-lcuda", "-ldl", "-lpthread"]),
                monitor: compile("tests/monitor.c", &["-ldl"]),
                escape: compile("tests/escape.c", &["-lbehind", "-lcuda", "-ldl", run_path]),
                preloaded: compile_as(parts.join("preloaded.so"), "tests/preloaded.c", &shared[..2]),
                work: compile("../../gpu/work.c", &["-ldl", "-lpthread"]),
                drivers,
            }
        })
    }
}

impl Built {
    /// Returns the path of the arbiter's program.
    pub(crate) fn arbiter(&self) -> PathBuf {
        self.library.with_file_name("tessera-arbiter")
    }
}

impl Container {
    /// Creates a container with `memory` MiB of the GPU and all of its time.
    pub(crate) fn with_memory(memory: u64) -> Self {
        Self::with(memory, 100)
    }

    /// Creates a container with `memory` MiB of the GPU and `compute_percent` percent of its time.
    pub(crate) fn with(memory: u64, compute_percent: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let container = Self { gpu: folder.path().join("gpu"), folder, order: "0" };
        container.limit(memory, compute_percent);
        container
    }

    /// Creates another container on the same GPU.
    pub(crate) fn beside(other: &Self, memory: u64, compute_percent: u32) -> Self {
        let container = Self { gpu: other.gpu.clone(), folder: tempfile::tempdir().unwrap(), order: "0" };
        container.limit(memory, compute_percent);
        container
    }

    /// Creates a container with a share of each of the first GPUs, in MiB and percent. Its programs
    /// see the GPUs in `order`.
    pub(crate) fn with_gpus(shares: &[(u64, u32)], order: &'static str) -> Self {
        let container = Self { order, ..Self::with(0, 100) };
        let gpus = shares.iter().zip(UUID[15]..).map(|(&(memory, compute_percent), last)| {
            let mut uuid = UUID;
            uuid[15] = last;
            GpuLimit {
                uuid: UuidBytes(uuid),
                memory: Bytes::from_mib(memory),
                context: Bytes::from_mib(CONTEXT),
                compute_percent,
                compute_ceiling_percent: compute_percent,
            }
        });
        let limits = GrantLimits { generation: 2, gpus: gpus.collect(), ..GrantLimits::default() };
        files::update_grant(&container.grant(), &limits).unwrap();
        container
    }

    /// Creates a container with the grants of two claims, each in a directory of its own. The first one has another GPU,
    /// and the second one has this much memory of the simulated GPU.
    pub(crate) fn with_claims(memory: u64) -> Self {
        let container = Self::with_memory(memory);
        let own = files::open_control(&container.grant()).unwrap().read().unwrap();
        std::fs::remove_dir_all(container.grant()).unwrap();
        let mut other = own.clone();
        other.gpus[0].uuid = UuidBytes([9; 16]);
        container.add_claim("a", &other);
        container.add_claim("b", &own);
        container
    }

    /// Adds the grant of a claim.
    pub(crate) fn add_claim(&self, name: &str, limits: &GrantLimits) {
        files::create_grant(&self.grant().join(name), limits).unwrap();
    }

    /// Returns the memory of the first GPU that is charged to the grant of a claim, in MiB.
    pub(crate) fn charged_to_claim(&self, name: &str) -> u64 {
        files::open_account(&self.grant().join(name)).unwrap().held(GpuSlot::FIRST).whole_mib()
    }

    /// Creates a container with a soft share: `compute_percent` guaranteed, and at most `ceiling`
    /// percent.
    pub(crate) fn with_ceiling(memory: u64, compute_percent: u32, ceiling: u32) -> Self {
        let container = Self::with(memory, compute_percent);
        container.limit_to(memory, compute_percent, ceiling);
        container
    }

    /// Changes the limits, possibly while programs run.
    pub(crate) fn limit(&self, memory: u64, compute_percent: u32) -> files::OwnedMapping<Control> {
        self.limit_to(memory, compute_percent, compute_percent)
    }

    /// Sets the memory that a context takes, as far as the agent knows it. 0 means unknown.
    pub(crate) fn set_context_size(&self, mib: u64) {
        let mut limits = files::open_control(&self.grant()).unwrap().read().unwrap();
        limits.gpus[0].context = Bytes::from_mib(mib);
        files::update_grant(&self.grant(), &limits).unwrap();
    }

    fn limit_to(&self, memory: u64, compute_percent: u32, ceiling: u32) -> files::OwnedMapping<Control> {
        let gpu = GpuLimit {
            uuid: UuidBytes(UUID),
            memory: Bytes::from_mib(memory),
            context: Bytes::from_mib(CONTEXT),
            compute_percent,
            compute_ceiling_percent: ceiling,
        };
        files::update_grant(
            &self.grant(),
            &GrantLimits { generation: 1, gpus: vec![gpu], ..GrantLimits::default() },
        )
        .unwrap()
    }

    pub(crate) fn grant(&self) -> PathBuf {
        self.folder.path().join("grant")
    }

    /// Returns the highest memory usage of the simulated GPU so far, in MiB.
    pub(crate) fn most(&self) -> u64 {
        self.read_gpu_file(0) >> 20
    }

    /// Returns the most work that was ever queued on the simulated GPU, in nanoseconds.
    pub(crate) fn longest_queue_ns(&self) -> u64 {
        self.read_gpu_file(8)
    }

    /// Returns the length of all work that the simulated GPU has got, in nanoseconds.
    pub(crate) fn work_ns(&self) -> u64 {
        self.read_gpu_file(16)
    }

    /// Returns the same for the second simulated GPU, or 0 as long as no program uses that GPU.
    pub(crate) fn work_of_second_gpu_ns(&self) -> u64 {
        let file = self.gpu.with_extension("1");
        if file.exists() { read_number(&file, 16) } else { 0 }
    }

    fn read_gpu_file(&self, place: u64) -> u64 {
        read_number(&self.gpu, place)
    }

    /// Opens the container's account.
    pub(crate) fn account(&self) -> AccountView {
        let account = File::open(files::account_path(&self.grant())).unwrap();
        AccountView { account, snapshot: AccountSnapshot::default() }
    }

    /// Starts a program that uses the entry point `entry`.
    pub(crate) fn start(&self, entry: &str) -> Tenant {
        self.start_under(Some(&Built::get().library), entry)
    }

    /// Starts a program without the library.
    #[allow(dead_code, reason = "only the benchmark compares with a program without the library")]
    pub(crate) fn start_bare(&self, entry: &str) -> Tenant {
        self.start_under(None, entry)
    }

    fn start_under(&self, library: Option<&Path>, entry: &str) -> Tenant {
        Tenant::start(self.program(&Built::get().tenant, library).arg(entry))
    }

    /// Returns the memory that a monitoring program sees.
    pub(crate) fn watched(&self) -> String {
        let built = Built::get();
        let output = self.program(&built.monitor, Some(&built.library)).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().into()
    }

    /// Returns the command for any program in the container.
    pub(crate) fn program(&self, program: &Path, library: Option<&Path>) -> Command {
        let mut command = Command::new(program);
        if let Some(library) = library {
            command.env("LD_PRELOAD", library);
        }
        command
            .env("LD_LIBRARY_PATH", &Built::get().drivers)
            .env("TESSERA_GRANT", self.grant())
            .env("SIMULATED_GPU", &self.gpu)
            .env("SIMULATED_ORDER", self.order);
        command
    }

    /// Starts a program that uses the GPU.
    pub(crate) fn begun(&self, entry: &str) -> Tenant {
        let mut tenant = self.start(entry);
        assert_eq!(tenant.ask("begin"), "0");
        tenant
    }
}

impl Tenant {
    /// Starts a program that executes commands.
    pub(crate) fn start(program: &mut Command) -> Self {
        let piped = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// Executes a command and returns the answer.
    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    /// Sends a command without waiting for the answer.
    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    /// Returns the answer to the last command.
    pub(crate) fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().into()
    }

    /// Ends the program and returns its standard error.
    pub(crate) fn end(self) -> String {
        let Self { child, input, output } = self;
        drop((input, output));
        let output = child.wait_with_output().unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// The account of a container for its first GPU, read again for each query.
#[derive(Debug)]
pub(crate) struct AccountView {
    account: File,
    snapshot: AccountSnapshot,
}

impl AccountView {
    fn read(&mut self) -> &AccountSnapshot {
        self.snapshot.read(|bytes, place| self.account.read_at(bytes, place));
        &self.snapshot
    }

    /// Returns whether a process waits until its memory has been measured.
    pub(crate) fn is_awaiting_measurement(&mut self) -> bool {
        self.read().is_awaiting_measurement()
    }

    /// Returns the number of processes that want the GPU.
    pub(crate) fn want(&mut self) -> u32 {
        self.read().demand(GpuSlot::FIRST, 0).wanting
    }

    /// Returns the number of processes that want the GPU and have nothing left of the window `number`.
    pub(crate) fn drained(&mut self, gpu: GpuSlot, number: u32) -> u32 {
        self.read().demand(gpu, number).drained
    }

    /// Returns how often threads have waited for a window or for room in the queue.
    pub(crate) fn waits(&mut self) -> u64 {
        self.read().process_usage().flatten().map(|said| said.waits).sum()
    }

    /// Returns the nanoseconds for which the GPU was busy.
    pub(crate) fn busy_ns(&mut self) -> u64 {
        self.read().busy(GpuSlot::FIRST)
    }
}

/// An arbiter process for some containers, which ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Arbiter {
    child: Child,
}

impl Arbiter {
    /// Starts an arbiter and waits until all containers see its heartbeat.
    pub(crate) fn start(containers: &[&Container]) -> Self {
        let folders: Vec<_> = containers.iter().map(|container| container.grant()).collect();
        let child = Command::new(Built::get().arbiter())
            .args(["run", "60", "73696d756c617465642d6770752d3030"])
            .args(&folders)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        for folder in &folders {
            let control = files::open_control(folder).unwrap();
            until(|| control.has_arbiter(futex::now()));
        }
        Self { child }
    }
}

impl Drop for Arbiter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The test itself as the arbiter of a container: windows open and close when the test says so, not by
/// the clock. It counts as running until [`ManualArbiter::stop`].
#[derive(Debug)]
pub(crate) struct ManualArbiter {
    control: files::OwnedMapping<Control>,
}

impl ManualArbiter {
    /// A moment that no test reaches.
    const NEVER: u64 = u64::MAX / 2;
    /// A moment before every test.
    const LONG_AGO: u64 = 1;

    /// Starts with all windows closed.
    pub(crate) fn start(container: &Container) -> Self {
        let control = files::open_control_writable(&container.grant()).unwrap();
        control.write_heartbeat(Self::NEVER);
        Self { control }
    }

    /// Opens a window whenever the container wants the GPU and has nothing left of the last window, until
    /// `is_done`. A program that pauses for a moment returns its window.
    pub(crate) fn serve(&self, gpu: GpuSlot, account: &mut AccountView, mut is_done: impl FnMut() -> bool) {
        let window = self.control.window(gpu);
        until(|| {
            if account.drained(gpu, window.read().number) > 0 {
                window.open(Self::NEVER);
                futex::wake(&window.change);
            }
            is_done()
        });
    }

    /// Closes the window and waits until the container has nothing left of it, and wants another one.
    pub(crate) fn close(&self, gpu: GpuSlot, account: &mut AccountView) {
        let window = self.control.window(gpu);
        window.set_deadline(Self::LONG_AGO);
        futex::wake(&window.change);
        until(|| account.drained(gpu, window.read().number) > 0);
    }

    /// Waits until a process asks for a measurement, and publishes this uncharged memory in MiB.
    pub(crate) fn measure(&self, account: &mut AccountView, uncharged: u64) {
        until(|| account.is_awaiting_measurement());
        self.publish(uncharged);
    }

    /// Publishes this uncharged memory in MiB, as measured now.
    pub(crate) fn publish(&self, uncharged: u64) {
        self.control.set_uncharged(GpuSlot::FIRST, Bytes::from_mib(uncharged), futex::now());
    }

    /// Dies.
    pub(crate) fn stop(self) {
        self.control.write_heartbeat(Self::LONG_AGO);
    }
}

/// Waits for a condition, for ever if need be: how long it takes depends on the machine.
pub(crate) fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        // A processor is left to the programs under test.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads a number from the head of a simulated GPU's file. The file is empty until a program has set its size.
fn read_number(file: &Path, place: u64) -> u64 {
    let mut word = [0; 8];
    let read = File::open(file).unwrap().read_at(&mut word, place).unwrap();
    if read == word.len() { u64::from_ne_bytes(word) } else { 0 }
}

pub(crate) fn write_at(file: &Path, place: u64, bytes: &[u8]) {
    File::options().write(true).open(file).unwrap().write_all_at(bytes, place).unwrap();
}
