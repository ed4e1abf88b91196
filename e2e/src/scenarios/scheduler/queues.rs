//! Kueue and JobSet, installed by their own charts: Kueue decides by quotas which jobs start, and the pods of those that
//! start get their GPUs together, on a real kubelet with our agent. Nothing fights over pods.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

use super::{SOON, Scheduling, Site, front, pods::annotation, together::staying};
use crate::harness::{Harness, pod};
use crate::scenarios::agent::Stage;

/// Longest time for the steps of several controllers, one after the other.
const WITHIN: Duration = Duration::from_secs(90);

/// The queue of the jobs. Its quota is half of the GPUs, and all of one GPU in shares.
const QUEUE: &str = "team";
const QUOTA: [(&str, u32); 3] =
    [("nvidia.com/gpu", 4), ("tencent.com/vcuda-core", 100), ("tencent.com/vcuda-memory", 320)];

/// The label by which Kueue finds the queue of a job.
const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";

/// Programs of jobs: one stays until its job is deleted, the other ends well.
const STAYS: &str = "exec sleep 100000";
const ENDS: &str = "exec sleep 2";

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let stage = Stage::start_with_controllers(&harness).await?;
    let _proxy = stage.cluster.start_proxy(&stage.node.name)?;
    install(&stage, "jobset", ["image", "controller.podSecurityContext"]).await?;
    // The scheduler finds the kind JobSet when it starts.
    let scheduling = Scheduling::start(&harness, stage.cluster.clone()).await?;
    let of_kueue = ["controllerManager.manager.image", "controllerManager.manager.podSecurityContext"];
    is_ready(&stage, "jobset").await?;
    install(&stage, "kueue", of_kueue).await?;
    restart_with_certificate(&stage, "kueue").await?;
    is_ready(&stage, "kueue").await?;
    let queues = Queues { stage, site: &scheduling.site };
    queues.make_quota().await?;
    queues.a_jobset_waits_for_its_quota().await?;
    queues.a_jobset_waits_for_room().await?;
    queues.shares_have_a_quota().await?;
    queues.pods_of_a_group_are_a_gang().await?;
    queues.all_gpus_are_free().await?;
    let metrics = front::get(scheduling.replica.addresses.pages, "/metrics").await.unwrap_or_default();
    ensure!(metrics.contains("tessera_scheduler_gpus_overbooked 0"), "{metrics}");
    Ok(())
}

struct Queues<'a> {
    stage: Stage,
    site: &'a Site,
}

impl Queues<'_> {
    fn note(&self, text: &str) {
        self.site.harness.note(text);
    }

    /// Applies an object, again until the webhooks of its project answer.
    async fn apply(&self, object: &Value) -> Result<()> {
        let file = self.manifest(object)?;
        let name = &object["metadata"]["name"];
        self.site
            .harness
            .wait_for(&format!("kubectl apply of {} {name}", object["kind"]), SOON, async || {
                let file = file.display().to_string();
                Ok(Some(self.stage.cluster.kubectl(&["apply", "-f", &file]).await?))
            })
            .await?;
        Ok(())
    }

    fn manifest(&self, object: &Value) -> Result<PathBuf> {
        let folder = self.site.harness.state("manifests")?;
        let file = folder.join(format!("{}.json", object["metadata"]["name"].as_str().context("no name")?));
        fs::write(&file, object.to_string())?;
        Ok(file)
    }

    async fn delete(&self, file: &Path) -> Result<()> {
        self.stage.cluster.kubectl(&["delete", "--wait=true", "-f", &file.display().to_string()]).await?;
        Ok(())
    }

    /// Gives the queue its quota.
    async fn make_quota(&self) -> Result<()> {
        let (names, amounts): (Vec<&str>, Vec<Value>) = QUOTA
            .iter()
            .map(|(name, amount)| (*name, json!({ "name": name, "nominalQuota": amount })))
            .unzip();
        let group = json!({
            "coveredResources": names,
            "flavors": [{ "name": "any-gpu", "resources": amounts }],
        });
        for (kind, name, spec) in [
            ("ResourceFlavor", "any-gpu", json!({})),
            ("ClusterQueue", QUEUE, json!({ "namespaceSelector": {}, "resourceGroups": [group] })),
            ("LocalQueue", QUEUE, json!({ "clusterQueue": QUEUE })),
        ] {
            let mut metadata = json!({ "name": name });
            if kind == "LocalQueue" {
                metadata["namespace"] = "default".into();
            }
            let object = json!({
                "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, "spec": spec,
            });
            self.apply(&object).await?;
        }
        Ok(())
    }

    /// A JobSet beyond the quota has no pods although its GPUs are free. When its quota is free, all of its pods run, get
    /// their GPUs as a gang, and end well.
    async fn a_jobset_waits_for_its_quota(&self) -> Result<()> {
        let first = job("first", 2, &[("nvidia.com/gpu", "2")], STAYS);
        self.apply(&first).await?;
        let running = self.pods_in("job-name=first", 2, "Running").await?;
        let jobset = jobset("second", &[("leader", 1, "2"), ("worker", 2, "1")], ENDS);
        self.apply(&jobset).await?;
        let said = self.waits_for_quota("second").await?;
        let pods = self.pods_of("jobset.sigs.k8s.io/jobset-name=second").await?;
        ensure!(pods.is_empty(), "a JobSet without quota has {} pods", pods.len());
        ensure!(
            uids(&self.pods_of("job-name=first").await?) == uids(&running),
            "pods of first were replaced"
        );
        self.note(&format!("a JobSet beyond the quota has no pods: {said}"));

        self.delete(&self.manifest(&first)?).await?;
        let ended = self.pods_in("jobset.sigs.k8s.io/jobset-name=second", 3, "Succeeded").await?;
        self.is_whole(&ended)?;
        self.completed("jobset/second", "Completed").await?;
        self.delete(&self.manifest(&jobset)?).await?;
        self.note("the JobSet was admitted when its quota was free; its 3 pods ran once and ended well");
        Ok(())
    }

    /// An admitted JobSet that does not fit holds no GPU. It runs as soon as all of its pods fit.
    async fn a_jobset_waits_for_room(&self) -> Result<()> {
        // Six of eight GPUs are taken outside of the queue, so one of two workers would fit.
        self.site.make(&staying("outside", &[("nvidia.com/gpu", "6")])).await?;
        self.stage.cluster.wait_for_phase("outside", "Running", SOON).await?;
        let jobset = jobset("third", &[("worker", 2, "2")], ENDS);
        self.apply(&jobset).await?;
        let of_third = "jobset.sigs.k8s.io/jobset-name=third";
        let waiting = self.pods_in(of_third, 2, "Pending").await?;
        for pod in &waiting {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            self.site.refused(name, "waits for GPUs for all of its 2 pods at the same time").await?;
        }
        let nodes = self.pods_of(of_third).await?;
        ensure!(nodes.iter().all(|pod| node_of(pod).is_none()), "a part of the gang is bound");
        self.stage.cluster.pods().delete("outside", &DeleteParams::default()).await?;
        let ended = self.pods_in(of_third, 2, "Succeeded").await?;
        ensure!(uids(&ended) == uids(&waiting), "pods were replaced");
        self.is_whole(&ended)?;
        self.completed("jobset/third", "Completed").await?;
        self.delete(&self.manifest(&jobset)?).await?;
        self.note("an admitted JobSet without room held no GPU, and ran when all of its pods fitted");
        Ok(())
    }

    /// Percent and memory of shares are a quota like GPUs, and both pods of a job share one GPU.
    async fn shares_have_a_quota(&self) -> Result<()> {
        let half = [("tencent.com/vcuda-core", "50"), ("tencent.com/vcuda-memory", "160")];
        let (shares, more) = (job("shares", 2, &half, STAYS), job("more-shares", 1, &half, ENDS));
        self.apply(&shares).await?;
        let pods = self.pods_in("job-name=shares", 2, "Running").await?;
        let gpus: BTreeSet<String> = pods.iter().map(gpu_of).collect::<Result<_>>()?;
        ensure!(gpus.len() == 1, "two halves are on {gpus:?}");
        self.apply(&more).await?;
        let said = self.waits_for_quota("more-shares").await?;
        self.delete(&self.manifest(&shares)?).await?;
        self.completed("job/more-shares", "Complete").await?;
        self.delete(&self.manifest(&more)?).await?;
        self.note(&format!("two halves of the quota share one GPU, and a third waited: {said}"));
        Ok(())
    }

    /// Plain pods that Kueue admits as a group are a gang by Kueue's own keys.
    async fn pods_of_a_group_are_a_gang(&self) -> Result<()> {
        for name in ["group-0", "group-1"] {
            let mut member = pod(name, ENDS, &[("nvidia.com/gpu", "2")]);
            let labels = [(QUEUE_LABEL, QUEUE), ("kueue.x-k8s.io/pod-group-name", "group")];
            member.metadata.labels = Some(labels.map(|(key, value)| (key.into(), value.into())).into());
            let count = ("kueue.x-k8s.io/pod-group-total-count".to_owned(), "2".to_owned());
            member.metadata.annotations = Some([count].into());
            self.site.make(&member).await?;
        }
        let ended = self.pods_in("kueue.x-k8s.io/pod-group-name=group", 2, "Succeeded").await?;
        self.is_whole(&ended)?;
        self.note("a group of plain pods was admitted by Kueue and placed as a gang");
        let group = ListParams::default().labels("kueue.x-k8s.io/pod-group-name=group");
        self.stage.cluster.pods().delete_collection(&DeleteParams::default(), &group).await?;
        Ok(())
    }

    /// A pod with all GPUs of the node runs, and no other pod is left.
    async fn all_gpus_are_free(&self) -> Result<()> {
        self.site
            .harness
            .wait_for("the pods of all jobs to be gone", WITHIN, async || {
                Ok(self.pods_of("").await?.is_empty().then_some(()))
            })
            .await?;
        self.site.make(&staying("all", &[("nvidia.com/gpu", "8")])).await?;
        self.stage.cluster.wait_for_phase("all", "Running", SOON).await?;
        self.note("all GPUs are free at the end");
        Ok(())
    }

    /// Checks that each pod of a job holds a grant, that no GPU is in two of them, and that no container restarted.
    fn is_whole(&self, pods: &[Pod]) -> Result<()> {
        for pod in pods {
            let status = pod.status.clone().unwrap_or_default();
            let restarts: i32 = status
                .container_statuses
                .unwrap_or_default()
                .iter()
                .map(|container| container.restart_count)
                .sum();
            ensure!(restarts == 0, "{:?} restarted {restarts} times", pod.metadata.name);
            ensure!(!annotation(pod, "tessera.dev/grant").is_empty(), "{:?} has no grant", pod.metadata.name);
        }
        let nodes: BTreeSet<Option<&str>> = pods.iter().map(node_of).collect();
        ensure!(nodes == BTreeSet::from([Some(self.stage.node.name.as_str())]), "the pods are on {nodes:?}");
        Ok(())
    }

    async fn pods_of(&self, selector: &str) -> Result<Vec<Pod>> {
        Ok(self.stage.cluster.pods().list(&ListParams::default().labels(selector)).await?.items)
    }

    /// Waits until the selected pods are so many and in this phase.
    async fn pods_in(&self, selector: &str, count: usize, phase: &str) -> Result<Vec<Pod>> {
        self.site
            .harness
            .wait_for(&format!("{count} pods with {selector} to be {phase}"), WITHIN, async || {
                let pods = self.pods_of(selector).await?;
                let phases: Vec<Option<&str>> =
                    pods.iter().map(|pod| pod.status.as_ref()?.phase.as_deref()).collect();
                ensure!(pods.len() <= count, "there are {} pods", pods.len());
                ensure!(phases == vec![Some(phase); count], "the pods are {phases:?}");
                Ok(Some(pods))
            })
            .await
    }

    /// Waits until Kueue says that a job waits for quota, and returns its message.
    async fn waits_for_quota(&self, job: &str) -> Result<String> {
        self.site
            .harness
            .wait_for(&format!("{job} to wait for quota"), WITHIN, async || {
                let list = self.stage.cluster.kubectl(&["get", "workloads", "-o", "json"]).await?;
                let list: Value = serde_json::from_str(&list)?;
                let own = list["items"]
                    .as_array()
                    .context("no list")?
                    .iter()
                    .find(|workload| workload["metadata"]["ownerReferences"][0]["name"] == job);
                let conditions = own.context("no workload")?["status"]["conditions"].as_array();
                let refused = conditions
                    .into_iter()
                    .flatten()
                    .find(|condition| condition["type"] == "QuotaReserved" && condition["status"] == "False");
                Ok(refused.and_then(|condition| condition["message"].as_str()).map(str::to_owned))
            })
            .await
    }

    async fn completed(&self, object: &str, condition: &str) -> Result<()> {
        let condition = format!("--for=condition={condition}");
        self.stage.cluster.kubectl(&["wait", object, &condition, "--timeout=90s"]).await?;
        Ok(())
    }
}

/// Installs a project by its own chart, with an image of the program that was built of the same sources. The names are
/// those of the chart's values for the image and for the security context of the pod.
async fn install(stage: &Stage, project: &str, [image, security]: [&str; 2]) -> Result<()> {
    let built = std::env::var_os("TESSERA_E2E_CONTROLLERS").map(PathBuf::from);
    let built = built.context("start this through e2e/run, which builds the controllers")?;
    let repository = format!("e2e.invalid/{project}");
    stage.harness.load_program(&stage.node, &format!("{repository}:1"), "manager", &built.join(project))?;
    let (chart, namespace) =
        (built.join(format!("{project}-chart")).display().to_string(), format!("{project}-system"));
    let values = [
        format!("{image}.repository={repository}"),
        format!("{image}.tag=1"),
        format!("{image}.pullPolicy=Never"),
        // The image names no user, and the charts ask for one that is not root.
        format!("{security}.runAsUser=65532"),
    ];
    let mut arguments = vec!["install", project, &chart, "--namespace", &namespace, "--create-namespace"];
    arguments.extend(values.iter().flat_map(|value| ["--set", value]));
    stage.cluster.helm(&arguments).await?;
    Ok(())
}

/// Creates the pod of a controller again as soon as the controller has made its certificate. A kubelet may take minutes to
/// write a changed Secret into a running pod.
async fn restart_with_certificate(stage: &Stage, project: &str) -> Result<()> {
    let namespace = format!("{project}-system");
    let secrets = ["-n", &namespace, "get", "secrets", "-o", "json"];
    stage
        .harness
        .wait_for(&format!("the certificate of {project}"), WITHIN, async || {
            let secrets: Value = serde_json::from_str(&stage.cluster.kubectl(&secrets).await?)?;
            let mut secrets = secrets["items"].as_array().context("no list")?.iter();
            Ok(secrets.any(|secret| secret["data"]["tls.crt"].is_string()).then_some(()))
        })
        .await?;
    stage.cluster.kubectl(&["-n", &namespace, "delete", "pods", "--all"]).await?;
    // No proxy of the API server may call Kueue's own API here, and an API that does not answer disturbs discovery.
    for version in ["v1beta1", "v1beta2"] {
        let name = format!("{version}.visibility.{project}.x-k8s.io");
        stage.cluster.kubectl(&["delete", "apiservice", &name]).await?;
    }
    Ok(())
}

/// Waits until the controller of a project is ready.
async fn is_ready(stage: &Stage, project: &str) -> Result<()> {
    let namespace = format!("{project}-system");
    let ready =
        ["-n", &namespace, "wait", "deployments", "--all", "--for=condition=Available", "--timeout=200s"];
    let outcome = stage.cluster.kubectl(&ready).await;
    if outcome.is_err() {
        let label = format!("app.kubernetes.io/name={project}");
        for about in [&["describe", "pods"][..], &["logs", "--tail=40", "-l", &label]] {
            let mut arguments = vec!["-n", namespace.as_str()];
            arguments.extend(about);
            stage.harness.note(&stage.cluster.kubectl(&arguments).await.unwrap_or_default());
        }
    }
    outcome?;
    stage.harness.note(&format!("{project} is installed by its own chart and ready"));
    Ok(())
}

/// Returns a Job of the queue whose pods run at the same time and are a gang, if it has more than one.
fn job(name: &str, pods: u32, asked: &[(&str, &str)], script: &str) -> Value {
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": name, "namespace": "default", "labels": { QUEUE_LABEL: QUEUE } },
        "spec": job_spec(pods, &pods.to_string(), asked, script),
    })
}

/// Returns a JobSet of the queue with Jobs of these names, numbers of pods and GPUs of each pod. All pods are one gang.
fn jobset(name: &str, jobs: &[(&str, u32, &str)], script: &str) -> Value {
    let jobs: Vec<Value> = jobs
        .iter()
        .map(|(job, pods, gpus)| {
            let spec = job_spec(*pods, "all", &[("nvidia.com/gpu", gpus)], script);
            json!({ "name": job, "replicas": 1, "template": { "spec": spec } })
        })
        .collect();
    json!({
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": { "name": name, "namespace": "default", "labels": { QUEUE_LABEL: QUEUE } },
        "spec": { "replicatedJobs": jobs },
    })
}

fn job_spec(pods: u32, gang: &str, asked: &[(&str, &str)], script: &str) -> Value {
    json!({
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {
            "metadata": { "annotations": { "tessera.dev/gang": gang } },
            "spec": pod("main", script, asked).spec,
        },
    })
}

fn uids(pods: &[Pod]) -> BTreeSet<Option<&str>> {
    pods.iter().map(|pod| pod.metadata.uid.as_deref()).collect()
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Returns the GPU of a pod with one share.
fn gpu_of(pod: &Pod) -> Result<String> {
    let grant: Value = serde_json::from_str(annotation(pod, "tessera.dev/grant"))?;
    Ok(grant["main"][0]["uuid"].as_str().context("no GPU in the grant")?.to_owned())
}
