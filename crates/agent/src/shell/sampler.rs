//! Samples the GPUs, each on its own thread, so that a GPU that hangs blocks neither the others nor a page.
//! The number of scrapes does not change how often the driver is called.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use tessera_cluster::FailureLog;
use tessera_core::gpu::GpuUuid;
use tessera_node::{
    gpus::{Gpus, GpusError, Incident, IncidentKind, ProcessMemory, SampleInterval, SampleProgress},
    processes::{FileId, Mapping, ProcessCache, Processes, RunState},
};

use crate::{
    controller::{ContainerTime, GpuProcess, LibraryMapping, ProcessState, View},
    exporter::{Consumer, Meter, Observation, ShareReports, Snapshot, families::MetricsOptions},
};

/// Configuration of the sampler and the exporter.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// Time between two samples of a GPU.
    pub interval: Duration,
    /// Directory in which the driver's PIDs are looked up, usually `/proc`.
    pub proc_root: PathBuf,
    /// True to use `/proc` even if it is not that of the host. By default it is not used then, because the same
    /// PIDs would name other processes.
    pub trust_proc_root: bool,
    /// Address of the host, for families with such a label.
    pub host_ip: String,
    /// Families of the metrics page.
    pub metrics: MetricsOptions,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(2),
            proc_root: PathBuf::from(PROC),
            trust_proc_root: false,
            host_ip: String::new(),
            metrics: MetricsOptions::default(),
        }
    }
}

const PROC: &str = "/proc";

/// Age in intervals up to which a sample is shown, if that is longer than [`MIN_MAX_AGE`].
const MAX_AGE_INTERVALS: u32 = 3;
/// Age up to which a sample is always shown.
const MIN_MAX_AGE: Duration = Duration::from_secs(10);

/// Age up to which it counts whether a process has mapped the library. A process may have thousands of
/// mappings, so they are not read again for each request.
const MAPPING_AGE: Duration = Duration::from_millis(900);

/// Timeout for the process lists of all GPUs.
const PROCESS_LIST_TIMEOUT: Duration = Duration::from_millis(200);

/// Samples the GPUs and accumulates their usage.
#[allow(missing_debug_implementations, reason = "a port is whatever is plugged in")]
pub struct Sampler {
    gpus: Arc<dyn Gpus>,
    sampling: Sampling,
    meter: Arc<Mutex<Meter>>,
    /// Threads of the GPUs that are sampled.
    pollers: Mutex<BTreeMap<GpuUuid, Poller>>,
    /// Reader of the host's processes, if they are visible.
    processes: Option<Processes>,
    /// Identities of the processes on the GPUs.
    known: Mutex<KnownProcesses>,
    /// Files of the library, as it is and as it was when running containers started.
    libraries: BTreeSet<FileId>,
}

/// Handle of the thread of a GPU. The thread ends when the handle is dropped.
struct Poller {
    requests: mpsc::Sender<mpsc::Sender<ProcessList>>,
    /// True while the thread works on a request for the process list.
    is_pending: Arc<AtomicBool>,
}

/// A GPU and its processes, or `None` if the driver does not list them.
type ProcessList = (GpuUuid, Option<Vec<ProcessMemory>>);

/// Processes that were on the GPUs at the last request.
#[derive(Default)]
struct KnownProcesses {
    cache: Option<ProcessCache>,
    /// PIDs inside the containers by PID on the host and start time. They never change.
    pids_in_namespace: HashMap<(u32, u64), Option<u32>>,
    /// Whether processes have mapped the library, and when that was read.
    mappings: HashMap<(u32, u64), (Instant, LibraryMapping)>,
    /// Logs once that mappings cannot be read.
    unreadable: FailureLog,
}

impl Sampler {
    /// Returns a sampler that samples no GPU yet.
    #[must_use]
    pub fn new(gpus: Arc<dyn Gpus>, sampling: Sampling) -> Self {
        let processes = Processes::at(sampling.proc_root.clone());
        let must_be_host = sampling.proc_root == Path::new(PROC) && !sampling.trust_proc_root;
        let is_usable = !must_be_host || processes.is_host_namespace() == Some(true);
        if !is_usable {
            tracing::warn!(
                proc_root = PROC,
                "this is not the host's PID namespace, so all GPU usage counts as unknown; \
                 set hostPID: true, or name the right directory with --proc-root"
            );
        }
        let processes = is_usable.then_some(processes);
        let known =
            KnownProcesses { cache: processes.clone().map(ProcessCache::new), ..KnownProcesses::default() };
        let (meter, pollers) = (Arc::default(), Mutex::default());
        let (known, libraries) = (Mutex::new(known), BTreeSet::new());
        Self { gpus, sampling, meter, pollers, processes, known, libraries }
    }

    /// Sets the files of the library, which processes of containers with shares have to map.
    #[must_use]
    pub(super) fn with_libraries(self, libraries: BTreeSet<FileId>) -> Self {
        Self { libraries, ..self }
    }

    /// Stops sampling.
    pub(super) fn stop(&self) {
        lock(&self.pollers).clear();
    }

    /// Updates the GPUs to sample and the pods of the node.
    pub(super) fn update(&self, view: &View) {
        let gpus = view.node.iter().flat_map(|node| node.node().gpus());
        let uuids: Vec<GpuUuid> = gpus.map(|gpu| gpu.uuid.clone()).collect();
        if view.node.is_some() {
            let mut pollers = lock(&self.pollers);
            pollers.retain(|gpu, _| uuids.contains(gpu));
            for gpu in &uuids {
                if !pollers.contains_key(gpu) {
                    match self.start_poller(gpu.clone()) {
                        Ok(poller) => drop(pollers.insert(gpu.clone(), poller)),
                        Err(error) => {
                            tracing::warn!(%gpu, %error, "cannot start the sampling thread of this GPU; will retry")
                        }
                    }
                }
            }
            lock(&self.meter).hide_missing(&uuids);
        }
        if view.pods_known {
            lock(&self.meter).set_pods(&view.pods);
        }
    }

    /// Counts an incident that the driver reported.
    pub(super) fn record_incident(&self, incident: &Incident) {
        if let (Some(gpu), IncidentKind::Xid(number)) = (&incident.gpu, incident.kind) {
            lock(&self.meter).record_xid(gpu, number, unix_time().as_secs_f64());
        }
    }

    /// Adds the current reports of all shares. `windows_age` is the age of the arbiter's values.
    pub fn report(&self, reports: ShareReports, windows_age: Duration) {
        let now = unix_time();
        lock(&self.meter).report(reports, now.as_secs_f64(), now.saturating_sub(windows_age).as_secs_f64());
    }

    /// Returns the GPUs that answered and the containers' processes on them. A GPU without processes in its last
    /// sample is asked only if it is in `required`.
    pub(super) fn container_processes(
        &self,
        required: &BTreeSet<GpuUuid>,
    ) -> (BTreeSet<GpuUuid>, Vec<GpuProcess>) {
        let Some(processes) = &self.processes else {
            return <(BTreeSet<GpuUuid>, Vec<GpuProcess>)>::default();
        };
        let lists = self.process_lists(|gpu| required.contains(gpu));
        let pids = lists.iter().flat_map(|(_, all)| all).map(|process| process.pid);
        let KnownProcesses { cache, pids_in_namespace, mappings, unreadable } = &mut *lock(&self.known);
        let known = cache.as_mut().map(|cache| cache.lookup(pids)).unwrap_or_default();
        let is_known =
            |(pid, started): &(u32, u64)| known.get(pid).is_some_and(|known| known.started == *started);
        pids_in_namespace.retain(|key, _| is_known(key));
        mappings.retain(|key, (at, _)| is_known(key) && at.elapsed() < MAPPING_AGE);
        let meter = lock(&self.meter);
        let mut found = Vec::new();
        for (gpu, process) in
            lists.iter().flat_map(|(gpu, all)| all.iter().map(move |process| (gpu, process)))
        {
            let Some(known) = known.get(&process.pid) else { continue };
            let Consumer::Container(key) = meter.consumer(Some(known)) else { continue };
            let identity = (process.pid, known.started);
            let in_namespace = pids_in_namespace.entry(identity);
            let mapping = mappings.entry(identity).or_insert_with(|| {
                (Instant::now(), self.library_mapping(processes, process.pid, unreadable))
            });
            let state = match processes.run_state(process.pid, known.started) {
                None => ProcessState::Ended,
                Some(RunState::Alive) => ProcessState::Alive,
                Some(RunState::Stopped) => ProcessState::Stopped,
            };
            found.push(GpuProcess {
                gpu: gpu.clone(),
                pid: process.pid,
                started: known.started,
                own_pid: *in_namespace.or_insert_with(|| processes.pid_in_namespace(process.pid)),
                container: (key.uid, key.container),
                bytes: process.bytes,
                state,
                library: mapping.1,
            });
        }
        (lists.into_iter().map(|(gpu, _)| gpu).collect(), found)
    }

    /// Returns the GPU times of containers so far.
    pub(super) fn container_times(&self) -> Vec<ContainerTime> {
        lock(&self.meter).container_times()
    }

    fn library_mapping(
        &self,
        processes: &Processes,
        pid: u32,
        unreadable: &mut FailureLog,
    ) -> LibraryMapping {
        match processes.mapping(pid, &self.libraries) {
            Ok(Mapping::Present) => LibraryMapping::Mapped,
            Ok(Mapping::Absent) if !self.libraries.is_empty() => LibraryMapping::NotMapped,
            Ok(Mapping::Absent | Mapping::Similar) => LibraryMapping::Unknown,
            Ok(Mapping::NoMemory) => LibraryMapping::NoMemory,
            Err(error) => {
                if unreadable.record(&error.to_string()) {
                    tracing::warn!(
                        pid, %error,
                        "cannot read the mappings of a process, so processes without the library are not \
                         noticed; add the capability SYS_PTRACE to the agent's container"
                    );
                }
                LibraryMapping::Unknown
            }
        }
    }

    /// Returns the process lists of all GPUs that have processes or are required. A GPU that hangs is waited for no
    /// longer than [`PROCESS_LIST_TIMEOUT`], and is not asked again until it has answered.
    fn process_lists(&self, is_required: impl Fn(&GpuUuid) -> bool) -> Vec<(GpuUuid, Vec<ProcessMemory>)> {
        let (answers, answered) = mpsc::channel();
        {
            let (pollers, meter) = (lock(&self.pollers), lock(&self.meter));
            let is_empty = |gpu: &GpuUuid| {
                let latest = meter.gpu(gpu).and_then(|gpu| gpu.latest.as_ref());
                latest.and_then(|latest| latest.sample.processes.as_ref()).is_some_and(Vec::is_empty)
            };
            for (_, poller) in pollers.iter().filter(|(gpu, _)| is_required(gpu) || !is_empty(gpu)) {
                if !poller.is_pending.swap(true, Ordering::Relaxed) {
                    let _ended = poller.requests.send(answers.clone());
                }
            }
        }
        drop(answers);
        let until = Instant::now() + PROCESS_LIST_TIMEOUT;
        let next = || answered.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
        std::iter::from_fn(next).filter_map(|(gpu, all)| Some((gpu, all?))).collect()
    }

    /// Returns the time in seconds since 1970 before which samples are too old to be shown.
    fn fresh_since(&self) -> f64 {
        let max_age = (self.sampling.interval * MAX_AGE_INTERVALS).max(MIN_MAX_AGE);
        unix_time().saturating_sub(max_age).as_secs_f64()
    }

    /// Returns the current state of the node.
    #[must_use]
    pub fn snapshot(&self, view: &View) -> Snapshot {
        let mut meter = lock(&self.meter);
        if view.pods_known {
            meter.set_pods(&view.pods);
        }
        let snapshot = Snapshot::new(view, &meter, self.fresh_since(), self.processes.is_some());
        Snapshot { host_ip: self.sampling.host_ip.clone(), ..snapshot }
    }

    /// Returns the options of the metrics page.
    #[must_use]
    pub fn metrics_options(&self) -> &MetricsOptions {
        &self.sampling.metrics
    }

    fn start_poller(&self, gpu: GpuUuid) -> io::Result<Poller> {
        let (requests, inbox) = mpsc::channel::<mpsc::Sender<ProcessList>>();
        let is_pending = Arc::new(AtomicBool::new(false));
        let poller = Poller { requests, is_pending: is_pending.clone() };
        let (gpus, meter, interval) = (self.gpus.clone(), self.meter.clone(), self.sampling.interval);
        let mut cache = self.processes.clone().map(ProcessCache::new);
        let mut progress = SampleProgress::default();
        let mut failures = FailureLog::default();
        let begin = Instant::now();
        let work = move || {
            loop {
                let started = Instant::now();
                let uptime = microseconds(started.duration_since(begin));
                let next = progress.next_interval(microseconds(unix_time()), uptime);
                match sample_gpu(&*gpus, &gpu, cache.as_mut(), next) {
                    Ok(observation) => {
                        if failures.clear() {
                            tracing::info!(%gpu, "sampling of the GPU works again");
                        }
                        progress.record(next, uptime, &observation.sample.work);
                        let duration_seconds = started.elapsed().as_secs_f64();
                        lock(&meter).observe(&gpu, Observation { duration_seconds, ..observation });
                    }
                    Err(error) => {
                        lock(&meter).record_failure(&gpu);
                        if failures.record(&error.to_string()) {
                            tracing::warn!(%gpu, %error, "cannot sample the GPU; its gauges are missing until it works");
                        }
                    }
                }
                loop {
                    match inbox.recv_timeout(interval.saturating_sub(started.elapsed())) {
                        Ok(answer) => {
                            let processes = gpus.processes(&gpu).ok();
                            is_pending.store(false, Ordering::Relaxed);
                            let _left = answer.send((gpu.clone(), processes));
                        }
                        Err(RecvTimeoutError::Timeout) => break,
                        Err(RecvTimeoutError::Disconnected) => return,
                    }
                }
            }
        };
        thread::Builder::new().name("gpu-sampler".into()).spawn(work)?;
        Ok(poller)
    }
}

/// Samples a GPU and looks up its processes.
pub fn sample_gpu(
    gpus: &dyn Gpus,
    gpu: &GpuUuid,
    cache: Option<&mut ProcessCache>,
    interval: SampleInterval,
) -> Result<Observation, GpusError> {
    let sample = gpus.sample(gpu, interval)?;
    let listed = sample.processes.iter().flatten().map(|process| process.pid);
    // A process that has ended may still have busy time.
    let worked = sample.work.processes.iter().flatten().map(|(pid, _)| *pid);
    let processes = cache.map(|cache| cache.lookup(listed.chain(worked))).unwrap_or_default();
    let at = Duration::from_micros(interval.now).as_secs_f64();
    Ok(Observation { at, duration_seconds: 0.0, sample, processes })
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use tessera_node::gpus::{DiscoveredGpus, GpuSample};

    use super::*;

    /// GPUs without processes: one hangs, one fails, and one can be sampled. They report the begin
    /// of each sample.
    struct PartlyBroken(mpsc::Sender<GpuUuid>);

    impl Gpus for PartlyBroken {
        fn discover(&self) -> Result<DiscoveredGpus, GpusError> {
            Err(GpusError::NoGpu)
        }

        fn sample(&self, gpu: &GpuUuid, _interval: SampleInterval) -> Result<GpuSample, GpusError> {
            let _ended = self.0.send(gpu.clone());
            let empty = GpuSample { processes: Some(Vec::new()), ..GpuSample::default() };
            if gpu.0.as_ref() == "empty" { Ok(empty) } else { Err(GpusError::NoGpu) }
        }

        fn processes(&self, gpu: &GpuUuid) -> Result<Vec<ProcessMemory>, GpusError> {
            match gpu.0.as_ref() {
                "hangs" => loop {
                    thread::park();
                },
                "fails" => Err(GpusError::NoGpu),
                _ => Ok(Vec::new()),
            }
        }

        fn watch(
            &self,
            _report: &mut dyn FnMut(Option<Incident>) -> ControlFlow<()>,
        ) -> Result<ControlFlow<()>, GpusError> {
            Ok(ControlFlow::Break(()))
        }

        fn have_device_nodes(&self) -> bool {
            false
        }
    }

    fn sampling(gpus: &[&str]) -> (Sampler, mpsc::Receiver<GpuUuid>) {
        let (begun, samples) = mpsc::channel();
        let sampling =
            Sampling { interval: Duration::from_millis(1), trust_proc_root: true, ..Sampling::default() };
        let sampler = Sampler::new(Arc::new(PartlyBroken(begun)), sampling);
        for gpu in gpus {
            let poller = sampler.start_poller((*gpu).into()).unwrap();
            lock(&sampler.pollers).insert((*gpu).into(), poller);
        }
        (sampler, samples)
    }

    #[test]
    fn leaves_out_a_gpu_that_hangs_and_asks_it_once() {
        let (sampler, _samples) = sampling(&["fine", "hangs", "fails"]);
        for _ in 0..2 {
            assert_eq!(sampler.container_processes(&BTreeSet::new()).0, ["fine".into()].into());
            let pending = |gpu: &str| lock(&sampler.pollers)[&gpu.into()].is_pending.load(Ordering::Relaxed);
            assert_eq!((pending("fine"), pending("hangs"), pending("fails")), (false, true, false));
        }
    }

    #[test]
    fn asks_a_gpu_without_processes_only_if_it_is_required() {
        let (sampler, samples) = sampling(&["fine", "empty"]);
        // The first sample is stored before the second one begins.
        assert_eq!(samples.iter().filter(|gpu| gpu.0.as_ref() == "empty").take(2).count(), 2);
        let all: BTreeSet<GpuUuid> = ["fine".into(), "empty".into()].into();
        assert_eq!(sampler.container_processes(&BTreeSet::new()).0, ["fine".into()].into());
        assert_eq!(sampler.container_processes(&all).0, all);
    }
}
