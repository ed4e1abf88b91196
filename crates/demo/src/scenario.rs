//! The scripted steps: what a newcomer shall see happen, each until it has happened.

use std::time::{Duration, Instant};

use serde_json::Value;
use tessera_sim::apiserver::{ApiServer, WatchEvent};
use tessera_wire::tessera::grant;

use crate::cluster::{Cluster, LIMITED_NAMESPACE, SPARE, URGENT};
use crate::jobs::DemoJob;
use crate::node::{RESERVED, SHARED};
use crate::report::StepReport;

/// How long a step may take. Each takes a second or two; the host may be busy, and the cluster full.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// Where the lists of broken GPUs lie.
const CONFIG_MAPS: &str = "/api/v1/namespaces/kube-system/configmaps";

/// The names of all steps, in order.
pub(crate) const STEPS: [&str; 6] =
    ["fractions", "training", "notebooks", "quota", "gpu-failure", "preemption"];

/// Plays one step. `round` keeps names apart.
pub(crate) async fn play(cluster: &Cluster, name: &'static str, round: u64) -> StepReport {
    let begun = Instant::now();
    let stage = StepContext { cluster, round };
    let played = async {
        match name {
            "fractions" => stage.fractions().await,
            "training" => stage.training().await,
            "notebooks" => stage.notebooks().await,
            "quota" => stage.quota().await,
            "gpu-failure" => stage.gpu_failure().await,
            _ => stage.preemption().await,
        }
    };
    let outcome = match tokio::time::timeout(STEP_TIMEOUT, played).await {
        Ok(outcome) => outcome,
        Err(_) => Err(format!("did not happen within {STEP_TIMEOUT:?}")),
    };
    let (happened, detail) = match outcome {
        Ok(detail) => (true, detail),
        Err(detail) => (false, detail),
    };
    StepReport { name, happened, detail, seconds: begun.elapsed().as_secs_f64() }
}

struct StepContext<'a> {
    cluster: &'a Cluster,
    round: u64,
}

type StepResult = Result<String, String>;

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

    fn make(&self, job: &DemoJob) -> Result<(), String> {
        let made = self.api().create(&job.path(), job.manifest(1.0));
        made.map(drop).map_err(|problem| problem["message"].to_string())
    }

    /// The pod as soon as it is as it should be.
    async fn until(
        &self,
        job: &DemoJob,
        what: &str,
        is_so: impl Fn(&Value) -> bool,
    ) -> Result<Value, String> {
        let watch = self.api().watch(&job.path(), &format!("metadata.name={}", job.name));
        let mut watch = watch.map_err(|problem| problem["message"].to_string())?;
        while let Some(happened) = watch.next().await {
            match happened {
                WatchEvent::Applied(pod) if is_so(&pod) => return Ok(pod),
                WatchEvent::Applied(pod) if pod["status"]["phase"] == "Failed" => {
                    return Err(format!("pod {} failed: {}", job.name, pod["status"]["message"]));
                }
                WatchEvent::Applied(_) => {}
                WatchEvent::Deleted(_) => {
                    return Err(format!("pod {} was gone before it was {what}", job.name));
                }
            }
        }
        Err("the API server hung up".to_owned())
    }

    async fn running(&self, job: &DemoJob) -> Result<Value, String> {
        self.until(job, "running", |pod| pod["status"]["phase"] == "Running").await
    }

    /// Deletes a pod and waits until it is gone.
    async fn end(&self, job: &DemoJob) -> Result<(), String> {
        let path = format!("{}/{}", job.path(), job.name);
        let mut watch = self
            .api()
            .watch(&job.path(), &format!("metadata.name={}", job.name))
            .map_err(|problem| problem["message"].to_string())?;
        if self.api().delete_gently(&path).is_err() {
            return Ok(());
        }
        while let Some(happened) = watch.next().await {
            if matches!(happened, WatchEvent::Deleted(_)) {
                return Ok(());
            }
        }
        Err("the API server hung up".to_owned())
    }

    async fn end_all(&self, jobs: &[DemoJob]) -> Result<(), String> {
        for job in jobs {
            self.end(job).await?;
        }
        Ok(())
    }

    /// Two halves of a GPU, in vcuda's words.
    async fn fractions(&self) -> StepResult {
        let share = [("tencent.com/vcuda-core", 40), ("tencent.com/vcuda-memory", 40)];
        let jobs = ["left-half", "right-half"].map(|name| self.job("research", name, &share));
        let mut gpus = Vec::new();
        for job in &jobs {
            self.make(job)?;
            gpus.push(gpus_of(&self.running(job).await?)?);
        }
        self.end_all(&jobs).await?;
        Ok(format!("two pods with 40 % of a GPU each run on {}", gpus.join(" and ")))
    }

    /// A set of four GPUs that are near each other.
    async fn training(&self) -> StepResult {
        let each = self.cluster.smallest_node_gpus().min(2);
        let worker =
            |number: usize| self.job("vision", &format!("worker-{number}"), &[("aliyun.com/gpu", each)]);
        let jobs: Vec<DemoJob> = (0..2).map(worker).collect();
        let mut gpus = Vec::new();
        for job in &jobs {
            self.make(job)?;
        }
        for job in &jobs {
            gpus.push(gpus_of(&self.running(job).await?)?);
        }
        self.end_all(&jobs).await?;
        Ok(format!("two workers with {each} GPUs each, near each other, run on {}", gpus.join(" and ")))
    }

    /// Memory only, in gpushare's words.
    async fn notebooks(&self) -> StepResult {
        let jobs = ["ada", "grace"]
            .map(|name| self.job("speech", &format!("notebook-{name}"), &[("aliyun.com/gpu-mem", 8)]));
        let mut gpus = Vec::new();
        for job in &jobs {
            self.make(job)?;
            gpus.push(gpus_of(&self.running(job).await?)?);
        }
        self.end_all(&jobs).await?;
        Ok(format!("two notebooks with 8 GiB each run on {}", gpus.join(" and ")))
    }

    /// The namespace may have one GPU; the second pod waits until the first has gone.
    async fn quota(&self) -> StepResult {
        let share = [("tencent.com/vcuda-core", 60), ("tencent.com/vcuda-memory", 40)];
        let [first, second] =
            ["homework", "late-homework"].map(|name| self.job(LIMITED_NAMESPACE, name, &share));
        self.make(&first)?;
        self.running(&first).await?;
        self.make(&second)?;
        let waits = self.until(&second, "refused", |pod| refusal(pod).contains("ExceedsGPUQuota")).await?;
        let why = refusal(&waits).to_owned();
        self.end(&first).await?;
        self.running(&second).await?;
        self.end(&second).await?;
        Ok(format!("the second pod of {LIMITED_NAMESPACE} waited ({why}) and ran when the first had gone"))
    }

    /// A GPU breaks, is withdrawn, and comes back.
    async fn gpu_failure(&self) -> StepResult {
        let node = &self.cluster.nodes[0];
        let gpu = u8::try_from(node.gpus.len() - 1).unwrap_or_default();
        let offers = |healthy: usize| {
            let healthy = healthy.to_string();
            move |node: &Value| node["status"]["allocatable"]["aliyun.com/gpu"] == healthy
        };
        let cause = |what: &str| node.incident(gpu, what).map_err(|error| error.to_string());
        let list = format!("unhealthy-gpu-{}", node.name);
        cause("xid 79")?;
        self.seen("/api/v1/nodes", &node.name, offers(node.gpus.len() - 1)).await?;
        self.seen(CONFIG_MAPS, &list, |map| map["data"]["gpus"] == gpu.to_string().as_str()).await?;
        cause("back")?;
        self.seen("/api/v1/nodes", &node.name, offers(node.gpus.len())).await?;
        let name = &node.name;
        Ok(format!(
            "GPU {gpu} of {name} fell off the bus (XID 79), was withdrawn, listed as broken, and came back"
        ))
    }

    /// Waits until an object is as it should be.
    async fn seen(&self, path: &str, name: &str, is_so: impl Fn(&Value) -> bool) -> Result<(), String> {
        let watch = self.api().watch(path, &format!("metadata.name={name}"));
        let mut watch = watch.map_err(|problem| problem["message"].to_string())?;
        while let Some(happened) = watch.next().await {
            if matches!(&happened, WatchEvent::Applied(object) if is_so(object)) {
                return Ok(());
            }
        }
        Err("the API server hung up".to_owned())
    }

    /// A pod that matters more gets the reserved node; the one on it has to go.
    async fn preemption(&self) -> StepResult {
        let all = self.cluster.reserved().gpus.len() as u64;
        let on_reserved = |name: &str, class| DemoJob {
            pool: RESERVED,
            priority_class: Some(class),
            ..self.job("research", name, &[("aliyun.com/gpu", all)])
        };
        let (spare, urgent) = (on_reserved("spare-time", SPARE), on_reserved("urgent", URGENT));
        self.make(&spare)?;
        self.running(&spare).await?;
        self.make(&urgent)?;
        let pod = self.running(&urgent).await?;
        let evicted = self.api().get(&format!("{}/{}", spare.path(), spare.name)).is_none();
        let gpus = gpus_of(&pod)?;
        self.end(&urgent).await?;
        if evicted {
            Ok(format!("{} was evicted for {}, which runs on {gpus}", spare.name, urgent.name))
        } else {
            Err(format!("{} runs although {} was not evicted", urgent.name, spare.name))
        }
    }
}

/// Why a pod waits.
fn refusal(pod: &Value) -> &str {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut scheduled =
        conditions.filter(|condition| condition["type"] == "PodScheduled" && condition["status"] == "False");
    scheduled.find_map(|condition| condition["message"].as_str()).unwrap_or_default()
}

/// `node-01 GPU 2,3`.
fn gpus_of(pod: &Value) -> Result<String, String> {
    let text = pod["metadata"]["annotations"][grant::KEY].as_str();
    let text = text.ok_or_else(|| format!("pod {} has no grant", pod["metadata"]["name"]))?;
    let containers: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let gpus = containers.as_object().into_iter().flatten().flat_map(|(_, gpus)| gpus.as_array());
    let gpus: Vec<String> = gpus.flatten().map(|gpu| gpu["index"].to_string()).collect();
    let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
    Ok(format!("{node} GPU {}", gpus.join(",")))
}
