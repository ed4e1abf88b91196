//! A simulated node: a kubelet that takes its pods from an API server, runs them for their run time
//! and reports their status.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tessera_core::gpu::Gpu;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::Pod;
use tessera_wire::kubelet::device_id::Resource;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::containers::Containers;
use super::status::{self, container_id};
use super::{Admitted, Checkpoint, Kubelet};
use crate::apiserver::{ApiServer, ObjectChange, now, pod_path};
use crate::events::ObjectEvent;

/// Pod annotation with the run time of the containers in seconds. Without it they run until they
/// are deleted.
pub const RUN_SECONDS_ANNOTATION: &str = "tessera.dev/simulated-run-seconds";

/// Settings of a simulated node.
#[derive(Debug, Clone)]
pub struct SimulatedNodeSettings {
    /// Name of the node.
    pub name: String,
    /// Labels in addition to the usual ones.
    pub labels: BTreeMap<String, String>,
    /// Root directory of the kubelet.
    pub root: PathBuf,
    /// File that describes the GPUs. Their usage is written beside it.
    pub gpu_file: PathBuf,
    /// GPUs of the node.
    pub gpus: Vec<Gpu>,
    /// Directory of the node's processes, the counterpart of `/proc`.
    pub proc_root: PathBuf,
    /// Seed of random choices.
    pub seed: u64,
}

/// A running simulated node.
#[derive(Debug)]
pub struct SimulatedNode {
    kubelet: Arc<Kubelet>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// Time that containers take to end after a deletion.
const TERMINATION_TIME: Duration = Duration::from_millis(200);

/// Delay before a container that could not start is started again.
const START_RETRY_DELAY: Duration = Duration::from_millis(500);

impl SimulatedNode {
    /// Registers the node and starts its kubelet.
    pub fn start(api: Arc<ApiServer>, settings: SimulatedNodeSettings) -> io::Result<Self> {
        let kubelet = Arc::new(Kubelet::start(settings.root.clone(), Checkpoint::default(), settings.seed)?);
        std::fs::create_dir_all(&settings.proc_root)?;
        let containers =
            Containers::new(&settings.gpu_file, settings.proc_root.clone(), settings.gpus.clone());
        register(&api, &settings);
        let stop = CancellationToken::new();
        let worker = Arc::new(Worker { api, kubelet: Arc::clone(&kubelet), containers, name: settings.name });
        let task = tokio::spawn(worker.run(stop.clone()));
        Ok(Self { kubelet, stop, task })
    }

    /// Returns the device manager.
    #[must_use]
    pub fn kubelet(&self) -> &Kubelet {
        &self.kubelet
    }

    /// Stops the node. Its pods end without a status update, as on a host that is switched off.
    pub async fn stop(self) {
        self.stop.cancel();
        // A panic of the task was logged when it event.
        let _ = self.task.await;
        if let Ok(kubelet) = Arc::try_unwrap(self.kubelet) {
            kubelet.stop().await;
        }
    }
}

fn register(api: &ApiServer, settings: &SimulatedNodeSettings) {
    let SimulatedNodeSettings { name, labels, .. } = settings;
    let mut all =
        json!({ "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64" });
    for (label, value) in labels {
        all[label] = value.clone().into();
    }
    let amounts = json!({ "cpu": "128", "memory": "1056Gi", "pods": "110" });
    let ready = json!({
        "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status",
        "lastHeartbeatTime": now(), "lastTransitionTime": now(),
    });
    let node = json!({
        "metadata": { "name": name, "labels": all },
        "status": {
            "capacity": amounts, "allocatable": amounts, "conditions": [ready],
            "addresses": [{ "type": "InternalIP", "address": "127.0.0.1" }, { "type": "Hostname", "address": name }],
            "nodeInfo": {
                "kubeletVersion": "v1.33.0-simulated", "osImage": "simulated", "kernelVersion": "simulated",
                "containerRuntimeVersion": "simulated://1", "architecture": "amd64", "operatingSystem": "linux",
            },
        },
    });
    // The node may exist already, like a host that was switched off and on.
    let _ = api.create("/api/v1/nodes", node);
    let lease = json!({ "metadata": { "name": name }, "spec": { "holderIdentity": name } });
    let _ = api.create("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", lease);
}

struct Worker {
    api: Arc<ApiServer>,
    kubelet: Arc<Kubelet>,
    containers: Containers,
    name: String,
}

impl Worker {
    async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut running: HashMap<String, CancellationToken> = HashMap::new();
        let mut tasks = JoinSet::new();
        let mut updates = self.kubelet.device_updates();
        let here = format!("spec.nodeName={}", self.name);
        'watch: loop {
            let Ok(mut pods) = self.api.watch("/api/v1/pods", &here) else { return };
            loop {
                tokio::select! {
                    () = stop.cancelled() => break 'watch,
                    Ok(()) = updates.changed() => self.publish_devices(),
                    event = pods.next() => match event {
                        None => break,
                        Some(ObjectChange::Applied(pod)) => self.clone().apply(pod, &mut running, &mut tasks),
                        Some(ObjectChange::Deleted(pod)) => {
                            let life = running.remove(text(&pod["metadata"]["uid"]));
                            life.iter().for_each(CancellationToken::cancel);
                        }
                    },
                    Some(_) = tasks.join_next() => {}
                }
            }
        }
        tasks.shutdown().await;
    }

    fn apply(
        self: Arc<Self>,
        pod: Value,
        running: &mut HashMap<String, CancellationToken>,
        tasks: &mut JoinSet<()>,
    ) {
        let uid = text(&pod["metadata"]["uid"]).to_owned();
        let is_ending = !pod["metadata"]["deletionTimestamp"].is_null();
        let has_ended = matches!(text(&pod["status"]["phase"]), "Succeeded" | "Failed");
        match running.get(&uid) {
            Some(life) if is_ending => life.cancel(),
            Some(_) => {}
            None if is_ending => self.delete_object(&pod),
            None if has_ended => {}
            None => {
                let life = CancellationToken::new();
                running.insert(uid, life.clone());
                tasks.spawn(async move { self.run_pod(pod, life).await });
            }
        }
    }

    /// Runs a pod from its admission to its end.
    async fn run_pod(&self, object: Value, end: CancellationToken) {
        // The API server creates no object that is not a valid pod.
        let Ok(pod) = serde_json::from_value::<Pod>(object.clone()) else { return };
        let admitted = match self.kubelet.admit(&pod).await {
            Ok(admitted) => admitted,
            Err(error) => {
                let reason = error.to_string();
                self.record_event(&object, true, "UnexpectedAdmissionError", &reason);
                self.set_status(&object, json!({
                    "phase": "Failed", "reason": "UnexpectedAdmissionError", "message": reason, "startTime": now(),
                }));
                return;
            }
        };
        let ended = end.run_until_cancelled(self.run_containers(&object, &pod, &admitted)).await;
        if ended.is_none() {
            // The pod was deleted, so its containers end after the termination time.
            tokio::time::sleep(TERMINATION_TIME).await;
        }
        let _ = self.containers.end(&pod.metadata.uid);
        self.kubelet.remove(&pod.metadata.uid);
        if ended.is_some() {
            self.set_status(&object, status::ended(&object));
        } else {
            self.delete_object(&object);
        }
    }

    /// Runs the containers until they complete.
    async fn run_containers(&self, object: &Value, pod: &Pod, admitted: &Admitted) {
        while let Err(reason) = self.kubelet.start_containers(pod).await {
            self.record_event(object, true, "Failed", &reason.to_string());
            tokio::time::sleep(START_RETRY_DELAY).await;
        }
        // The kubelet does not admit a pod with unreadable requests.
        for claim in pod.spec.claims(MemoryUnit::GiB).unwrap_or_default() {
            let (uid, container) = (&pod.metadata.uid, &claim.container);
            let Some(given) = admitted.get(container) else { continue };
            let id = container_id(uid, container);
            if let Err(error) = self.containers.start(uid, container, &id, claim.request, given) {
                self.record_event(
                    object,
                    true,
                    "Failed",
                    &format!("container {container} cannot start: {error}"),
                );
            }
        }
        self.set_status(object, status::running(object));
        let names: Vec<&str> = pod.spec.containers.iter().map(|container| container.name.as_str()).collect();
        self.record_event(object, false, "Started", &format!("Started container {}", names.join(", ")));
        let seconds =
            pod.metadata.annotations.get(RUN_SECONDS_ANNOTATION).and_then(|text| text.parse::<f64>().ok());
        match seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
            Some(time) => tokio::time::sleep(time).await,
            None => std::future::pending().await,
        }
    }

    fn set_status(&self, pod: &Value, status: Value) {
        let patch = json!({ "metadata": { "uid": pod["metadata"]["uid"] }, "status": status });
        // The pod may be gone or replaced by another one of its name.
        let _ = self.api.patch(&format!("{}/status", pod_path(pod)), &patch);
    }

    /// Deletes the object of a pod that has ended because it was deleted.
    fn delete_object(&self, pod: &Value) {
        let current = self.api.get(&pod_path(pod));
        let same = current.is_some_and(|current| current["metadata"]["uid"] == pod["metadata"]["uid"]);
        if same {
            let _ = self.api.delete(&pod_path(pod));
        }
    }

    fn record_event(&self, about: &Value, is_warning: bool, reason: &str, message: &str) {
        ObjectEvent { about, is_warning, reason, message, component: "kubelet" }.write(&self.api);
    }

    /// Publishes the amounts of the plugins' devices in the node's status.
    fn publish_devices(&self) {
        let (mut capacity, mut allocatable) = (json!({}), json!({}));
        for resource in Resource::ALL {
            if let Some((all, healthy)) = self.kubelet.devices(resource.name()) {
                capacity[resource.name()] = all.to_string().into();
                allocatable[resource.name()] = healthy.to_string().into();
            }
        }
        let status = json!({ "status": { "capacity": capacity, "allocatable": allocatable } });
        let _ = self.api.patch(&format!("/api/v1/nodes/{}/status", self.name), &status);
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
