//! The scripted steps of the demo. Each step waits until it has the expected outcome.

use std::time::{Duration, Instant};

use serde_json::Value;
use tessera_core::gpu::Health;
use tessera_sim::apiserver::{ApiServer, ObjectChange};
use tessera_wire::foreign::unhealthy;
use tessera_wire::tessera::{grant, inventory};

use crate::cluster::{Cluster, LIMITED_NAMESPACE, SPARE, URGENT};
use crate::jobs::DemoJob;
use crate::node::{RESERVED, SHARED};
use crate::report::StepReport;

/// Timeout of a step. A step takes a second or two, but the host may be busy and the cluster full: pods of the
/// stream run for up to 40 seconds.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// Path of the ConfigMaps that list broken GPUs.
const CONFIG_MAPS: &str = "/api/v1/namespaces/kube-system/configmaps";

/// Names of all steps in order.
pub(crate) const STEPS: [&str; 6] =
    ["fractions", "training", "notebooks", "quota", "gpu-failure", "preemption"];

/// Reasons why a step fails.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error("the API server rejected a request: {0}")]
    Rejected(String),
    #[error("the API server closed a watch")]
    WatchClosed,
    #[error("pod {pod} failed: {message}")]
    PodFailed { pod: String, message: Value },
    #[error("pod {pod} was deleted before it was {what}")]
    PodDeleted { pod: String, what: String },
    #[error("pod {0} has no grant")]
    NoGrant(Value),
    #[error("cannot read the grant of a pod: {0}")]
    BadGrant(#[from] serde_json::Error),
    #[error("cannot inject an event into a GPU: {0}")]
    Incident(#[from] std::io::Error),
    #[error("{urgent} runs although {spare} was not evicted")]
    NotEvicted { urgent: String, spare: String },
    #[error("no success within {STEP_TIMEOUT:?}")]
    Timeout,
}

impl StepError {
    /// Converts the error body of the API server.
    fn rejected(body: Value) -> Self {
        Self::Rejected(body["message"].to_string())
    }
}

/// Runs one step. `round` distinguishes the pods of repeated steps.
pub(crate) async fn play(cluster: &Cluster, name: &'static str, round: u64) -> StepReport {
    let begun = Instant::now();
    let step = StepContext { cluster, round };
    let played = async {
        match name {
            "fractions" => step.fractions().await,
            "training" => step.training().await,
            "notebooks" => step.notebooks().await,
            "quota" => step.quota().await,
            "gpu-failure" => step.gpu_failure().await,
            _ => step.preemption().await,
        }
    };
    let result = tokio::time::timeout(STEP_TIMEOUT, played).await.unwrap_or(Err(StepError::Timeout));
    let (happened, detail) = match result {
        Ok(detail) => (true, detail),
        Err(error) => (false, error.to_string()),
    };
    StepReport { name, happened, detail, seconds: begun.elapsed().as_secs_f64() }
}

struct StepContext<'a> {
    cluster: &'a Cluster,
    round: u64,
}

/// A sentence that describes what happened.
type StepResult = Result<String, StepError>;

impl StepContext<'_> {
    fn api(&self) -> &ApiServer {
        &self.cluster.api
    }

    fn job(&self, namespace: &str, name: &str, limits: &[(&'static str, u64)]) -> DemoJob {
        DemoJob {
            namespace: namespace.to_owned(),
            name: format!("{name}-r{}", self.round),
            limits: limits.to_vec(),
            runs_for: None,
            pool: SHARED,
            priority_class: None,
        }
    }

    fn create(&self, job: &DemoJob) -> Result<(), StepError> {
        self.api().create(&job.path(), job.manifest(1.0)).map(drop).map_err(StepError::rejected)
    }

    /// Waits until the pod fulfils a condition and returns the pod.
    async fn until(
        &self,
        job: &DemoJob,
        what: &str,
        is_so: impl Fn(&Value) -> bool,
    ) -> Result<Value, StepError> {
        let watch = self.api().watch(&job.path(), &format!("metadata.name={}", job.name));
        let mut watch = watch.map_err(StepError::rejected)?;
        while let Some(event) = watch.next().await {
            match event {
                ObjectChange::Applied(pod) if is_so(&pod) => return Ok(pod),
                ObjectChange::Applied(pod) if pod["status"]["phase"] == "Failed" => {
                    let message = pod["status"]["message"].clone();
                    return Err(StepError::PodFailed { pod: job.name.clone(), message });
                }
                ObjectChange::Applied(_) => {}
                ObjectChange::Deleted(_) => {
                    return Err(StepError::PodDeleted { pod: job.name.clone(), what: what.to_owned() });
                }
            }
        }
        Err(StepError::WatchClosed)
    }

    async fn running(&self, job: &DemoJob) -> Result<Value, StepError> {
        self.until(job, "running", |pod| pod["status"]["phase"] == "Running").await
    }

    /// Deletes a pod and waits until it is gone.
    async fn end(&self, job: &DemoJob) -> Result<(), StepError> {
        let path = format!("{}/{}", job.path(), job.name);
        let watch = self.api().watch(&job.path(), &format!("metadata.name={}", job.name));
        let mut watch = watch.map_err(StepError::rejected)?;
        if self.api().delete_gently(&path).is_err() {
            return Ok(());
        }
        while let Some(event) = watch.next().await {
            if matches!(event, ObjectChange::Deleted(_)) {
                return Ok(());
            }
        }
        Err(StepError::WatchClosed)
    }

    async fn end_all(&self, jobs: &[DemoJob]) -> Result<(), StepError> {
        for job in jobs {
            self.end(job).await?;
        }
        Ok(())
    }

    /// Two shares of a GPU with the resources of vcuda.
    async fn fractions(&self) -> StepResult {
        let share = [("tencent.com/vcuda-core", 40), ("tencent.com/vcuda-memory", 40)];
        let jobs = ["left-half", "right-half"].map(|name| self.job("research", name, &share));
        let mut gpus = Vec::new();
        for job in &jobs {
            self.create(job)?;
            gpus.push(gpus_of(&self.running(job).await?)?);
        }
        self.end_all(&jobs).await?;
        Ok(format!("two pods with 40 % of a GPU each run on {}", gpus.join(" and ")))
    }

    /// Two workers whose GPUs are near each other.
    async fn training(&self) -> StepResult {
        let each = self.cluster.smallest_node_gpus().min(2);
        if self.cluster.shared_gpus() < 2 {
            return Ok("not shown: two workers need two GPUs; start the demo with more nodes".to_owned());
        }
        let worker =
            |number: usize| self.job("vision", &format!("worker-{number}"), &[("aliyun.com/gpu", each)]);
        let jobs: Vec<DemoJob> = (0..2).map(worker).collect();
        let mut gpus = Vec::new();
        for job in &jobs {
            self.create(job)?;
        }
        for job in &jobs {
            gpus.push(gpus_of(&self.running(job).await?)?);
        }
        self.end_all(&jobs).await?;
        Ok(format!("two workers with {each} linked GPUs each run on {}", gpus.join(" and ")))
    }

    /// GPU memory only, with the resource of gpushare.
    async fn notebooks(&self) -> StepResult {
        let jobs = ["ada", "grace"]
            .map(|name| self.job("speech", &format!("notebook-{name}"), &[("aliyun.com/gpu-mem", 8)]));
        let mut gpus = Vec::new();
        for job in &jobs {
            self.create(job)?;
            gpus.push(gpus_of(&self.running(job).await?)?);
        }
        self.end_all(&jobs).await?;
        Ok(format!("two notebooks with 8 GiB each run on {}", gpus.join(" and ")))
    }

    /// The quota of the namespace allows one GPU. The second pod waits until the first has ended.
    async fn quota(&self) -> StepResult {
        let share = [("tencent.com/vcuda-core", 60), ("tencent.com/vcuda-memory", 40)];
        let [first, second] =
            ["homework", "late-homework"].map(|name| self.job(LIMITED_NAMESPACE, name, &share));
        self.create(&first)?;
        self.running(&first).await?;
        self.create(&second)?;
        let waits = self.until(&second, "refused", |pod| refusal(pod).contains("ExceedsGPUQuota")).await?;
        let why = refusal(&waits).to_owned();
        self.end(&first).await?;
        self.running(&second).await?;
        self.end(&second).await?;
        Ok(format!("the second pod of {LIMITED_NAMESPACE} waited ({why}) and ran after the first had ended"))
    }

    /// A GPU breaks, is withdrawn from the node, and recovers.
    async fn gpu_failure(&self) -> StepResult {
        let node = &self.cluster.nodes[0];
        let gpu = u8::try_from(node.gpus.len() - 1).unwrap_or_default();
        let has_gpus = |node: &Value, is_wanted: fn(Health) -> bool| {
            let text = node["metadata"]["annotations"][inventory::KEY].as_str().unwrap_or_default();
            let health =
                inventory::parse(text).map(|read| read.gpus.get(usize::from(gpu)).map(|gpu| gpu.health));
            health.is_ok_and(|health| health.is_some_and(is_wanted))
        };
        // Devices that pods of other resources hold are withdrawn too, so there may be even fewer.
        let most = node.gpus.len() - 1;
        let is_withdrawn = |node: &Value| {
            let offered = node["status"]["allocatable"]["aliyun.com/gpu"].as_str().unwrap_or_default();
            offered.parse().is_ok_and(|offered: usize| offered <= most)
        };
        let cause = |what: &str| node.incident(gpu, what);
        let list = format!("{}{}", unhealthy::PREFIX, node.name);
        cause("xid 79")?;
        let is_broken = |node: &Value| has_gpus(node, |health| !health.is_healthy()) && is_withdrawn(node);
        self.wait_for("/api/v1/nodes", &node.name, is_broken).await?;
        self.wait_for(CONFIG_MAPS, &list, |map| map["data"]["gpus"] == gpu.to_string().as_str()).await?;
        cause("back")?;
        self.wait_for("/api/v1/nodes", &node.name, |node| has_gpus(node, Health::is_healthy)).await?;
        let name = &node.name;
        Ok(format!(
            "GPU {gpu} of {name} fell off the bus (XID 79), was withdrawn and listed as broken, then recovered"
        ))
    }

    /// Waits until an object fulfils a condition.
    async fn wait_for(
        &self,
        path: &str,
        name: &str,
        is_so: impl Fn(&Value) -> bool,
    ) -> Result<(), StepError> {
        let watch = self.api().watch(path, &format!("metadata.name={name}"));
        let mut watch = watch.map_err(StepError::rejected)?;
        while let Some(event) = watch.next().await {
            if matches!(&event, ObjectChange::Applied(object) if is_so(object)) {
                return Ok(());
            }
        }
        Err(StepError::WatchClosed)
    }

    /// A pod of higher priority gets the reserved node, and the pod on that node is evicted.
    async fn preemption(&self) -> StepResult {
        let Some(reserved) = self.cluster.reserved() else {
            return Ok("not shown: it needs a second node; start the demo with --nodes 2".to_owned());
        };
        let all = reserved.gpus.len() as u64;
        let on_reserved = |name: &str, class| DemoJob {
            pool: RESERVED,
            priority_class: Some(class),
            ..self.job("research", name, &[("aliyun.com/gpu", all)])
        };
        let (spare, urgent) = (on_reserved("spare-time", SPARE), on_reserved("urgent", URGENT));
        self.create(&spare)?;
        self.running(&spare).await?;
        self.create(&urgent)?;
        let pod = self.running(&urgent).await?;
        let evicted = self.api().get(&format!("{}/{}", spare.path(), spare.name)).is_none();
        let gpus = gpus_of(&pod)?;
        self.end(&urgent).await?;
        if evicted {
            Ok(format!("{} was evicted for {}, which runs on {gpus}", spare.name, urgent.name))
        } else {
            Err(StepError::NotEvicted { urgent: urgent.name, spare: spare.name })
        }
    }
}

/// Returns why a pod waits.
fn refusal(pod: &Value) -> &str {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut scheduled =
        conditions.filter(|condition| condition["type"] == "PodScheduled" && condition["status"] == "False");
    scheduled.find_map(|condition| condition["message"].as_str()).unwrap_or_default()
}

/// Returns node and GPUs of a pod, such as `node-01 GPU 2,3`.
fn gpus_of(pod: &Value) -> Result<String, StepError> {
    let text = pod["metadata"]["annotations"][grant::KEY].as_str();
    let text = text.ok_or_else(|| StepError::NoGrant(pod["metadata"]["name"].clone()))?;
    let containers: Value = serde_json::from_str(text)?;
    let gpus = containers.as_object().into_iter().flatten().flat_map(|(_, gpus)| gpus.as_array());
    let gpus: Vec<String> = gpus.flatten().map(|gpu| gpu["index"].to_string()).collect();
    let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
    Ok(format!("{node} GPU {}", gpus.join(",")))
}
