//! What ships runs as it ships: the image of `deploy/image/build` and the chart, on a real kubelet, containerd and
//! controller manager, installed, upgraded, rolled back and removed by Helm.

mod disruptions;
mod gpus;
mod removal;

use std::{cell::Cell, collections::BTreeMap, fs, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Pod, PodResourceClaim, Service},
};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use serde_json::{Value, json};
use tessera_wire::tessera::inventory;

use super::Site;
use crate::{
    harness::{Cluster, Component, Harness, Parts, RealNode, deploy, pod},
    scenarios::agent::eight_gpus,
};

/// The version of the cluster, as its API server announces it.
const KUBERNETES: &str = "v1.36.4";
const NAMESPACE: &str = "kube-system";
const RELEASE: &str = "tessera";
/// The label that node pools of GKE with GPUs have.
const OF_POOL: &str = "cloud.google.com/gke-accelerator=nvidia-l4";
/// The label of node feature discovery for a PCI device of NVIDIA.
const FOUND: &str = "feature.node.kubernetes.io/pci-10de.present=true";
const SOON: Duration = Duration::from_secs(60);
/// A small share of a GPU.
const SMALL: [(&str, &str); 2] = [("tencent.com/vcuda-core", "5"), ("tencent.com/vcuda-memory", "5")];
/// Time between two pods of the load.
const LOAD_INTERVAL: Duration = Duration::from_millis(700);

struct Installation {
    site: Site,
    /// The node with GPUs.
    node: RealNode,
    /// A node without GPUs, for the second replica of the scheduler.
    plain_node: RealNode,
    values: PathBuf,
    _proxy: Component,
}

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let installed = Installation::prepare(&harness).await?;
    installed.install(&[]).await?;
    installed.fresh_node_gets_its_agent(OF_POOL).await?;
    let kube_scheduler = installed.connect_kube_scheduler().await?;
    installed.helm_test().await?;
    installed.share_runs("steady").await?;
    installed.refused().await?;
    installed.upgrade_scheduler().await?;
    installed.upgrade_all().await?;
    installed.disruptions().await?;
    installed.uninstall().await?;
    installed.remove_traces().await?;
    drop(kube_scheduler);
    Box::pin(installed.second_scheduler()).await?;
    installed.remove_host_files().await
}

impl Installation {
    /// Starts a cluster with a node that is going to have GPUs and a node without GPUs, and loads the image.
    async fn prepare(harness: &Harness) -> Result<Self> {
        let cluster = Cluster::start(harness, Parts::ALL).await?;
        let node = cluster.add_node(1).await?;
        let plain_node = cluster.add_node(2).await?;
        let proxy = cluster.start_proxy(&node.name)?;
        let names = ["e2e.invalid/tessera:one", "e2e.invalid/tessera:two"];
        harness.load_shipped_image(&[&node, &plain_node], &names)?;
        harness.note("the image is built and loaded");
        let gpus = harness.state("gpus")?;
        fs::write(gpus.join("gpus.json"), inventory::print(&eight_gpus()))?;
        let class = json!({ "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": { "name": "nvidia" }, "handler": "nvidia" });
        let file = harness.state("manifests")?.join("runtime-class.json");
        fs::write(&file, class.to_string())?;
        cluster.kubectl(&["apply", "-f", &file.display().to_string()]).await?;
        let values = harness.state("manifests")?.join("values.json");
        let content = json!({
            "image": { "repository": "e2e.invalid/tessera", "tag": "one" },
            "agent": {
                "cdiDirectory": node.cdi(),
                "extraArgs": ["--gpus=simulated:/etc/e2e/gpus.json"],
                "extraVolumes": [{ "name": "e2e", "hostPath": { "path": gpus } }],
                "extraVolumeMounts": [{ "name": "e2e", "mountPath": "/etc/e2e", "readOnly": true }],
            },
        });
        fs::write(&values, content.to_string())?;
        let site = Site { harness: harness.clone(), cluster: Arc::new(cluster) };
        Ok(Self { site, node, plain_node, values, _proxy: proxy })
    }

    fn cluster(&self) -> &Cluster {
        &self.site.cluster
    }

    fn note(&self, text: &str) {
        self.site.harness.note(text);
    }

    /// Installs or upgrades the chart and waits until everything is ready.
    async fn install(&self, set: &[&str]) -> Result<()> {
        let (chart, values) =
            (deploy().join("chart").display().to_string(), self.values.display().to_string());
        let mut arguments = vec!["upgrade", "--install", RELEASE, &chart, "--namespace", NAMESPACE];
        arguments.extend(["--values", &values, "--wait", "--timeout", "150s"]);
        arguments.extend(set.iter().flat_map(|value| ["--set", value]));
        let outcome = self.cluster().helm(&arguments).await;
        if outcome.is_err() {
            let pods = self.cluster().kubectl(&["-n", NAMESPACE, "describe", "pods"]).await?;
            self.note(&pods);
            for app in ["tessera-agent", "tessera-scheduler"] {
                let selector = format!("app={app}");
                let logs = ["-n", NAMESPACE, "logs", "-l", &selector, "--all-containers", "--tail=20"];
                self.note(&self.cluster().kubectl(&logs).await.unwrap_or_default());
            }
        }
        outcome?;
        self.note(&format!("helm upgrade --install {}: all is ready", set.join(" ")));
        Ok(())
    }

    /// Gives the node a label of GPUs after the installation, as an autoscaler or a discovery tool does. The node had no
    /// agent before, and gets one that is ready.
    async fn fresh_node_gets_its_agent(&self, label: &str) -> Result<()> {
        let before = self.pods_of("tessera-agent").await?;
        ensure!(before.is_empty(), "no node has a label of GPUs, and there are {before:?}");
        self.cluster().kubectl(&["label", "node", &self.node.name, label]).await?;
        let daemons: Api<DaemonSet> = Api::namespaced(self.cluster().client(), NAMESPACE);
        self.site
            .harness
            .wait_for("the agent of the fresh node", SOON, async || {
                let status = daemons.get("tessera-agent").await?.status.unwrap_or_default();
                let counts = (status.desired_number_scheduled, status.number_ready);
                ensure!(counts == (1, 1), "agents wanted and ready: {counts:?}");
                Ok(Some(()))
            })
            .await?;
        self.note(&format!("a node that got the label {label} after the installation has its agent"));
        Ok(())
    }

    /// Restarts kube-scheduler with the shipped configuration and the address of the Service.
    async fn connect_kube_scheduler(&self) -> Result<Component> {
        if let Some(scheduler) = &self.cluster().scheduler {
            scheduler.stop().await?;
        }
        let services: Api<Service> = Api::namespaced(self.cluster().client(), NAMESPACE);
        let service = services.get("tessera-scheduler").await?.spec.unwrap_or_default();
        let address = format!("{}:12345", service.cluster_ip.context("the Service has no address")?);
        let address: SocketAddr = address.parse()?;
        self.site.shipped_kube_scheduler("kube-scheduler-with-tessera", address).await
    }

    /// Runs `helm test`, which starts a pod with a share.
    async fn helm_test(&self) -> Result<()> {
        let outcome =
            self.cluster().helm(&["test", RELEASE, "--namespace", NAMESPACE, "--timeout", "130s"]).await?;
        ensure!(outcome.contains("Succeeded"), "{outcome}");
        self.note("helm test: a pod with a share of a GPU ran");
        Ok(())
    }

    /// Starts a pod with a share that stays, and checks that the container has its limits and the library.
    async fn share_runs(&self, name: &str) -> Result<()> {
        let script = "ls /etc/tessera && cat /etc/ld.so.preload && echo end && exec sleep 100000";
        let asked = [("tencent.com/vcuda-core", "30"), ("tencent.com/vcuda-memory", "40")];
        self.site.make(&pod(name, script, &asked)).await?;
        self.cluster().wait_for_phase(name, "Running", SOON).await?;
        let log = self.cluster().pods();
        let parameters = kube::api::LogParams::default();
        let text = self
            .site
            .harness
            .wait_for("the log of the share", SOON, async || {
                Ok(Some(log.logs(name, &parameters).await?).filter(|text| text.ends_with("end\n")))
            })
            .await?;
        ensure!(text.contains("control") && text.contains("/usr/lib/tessera/libtessera.so"), "{text}");
        self.note(&format!("{name} runs with a share, its limits and the library"));
        Ok(())
    }

    /// Requests beyond the rights of the accounts are refused.
    async fn refused(&self) -> Result<()> {
        let cases: [(&str, &[&str]); 5] = [
            ("tessera-agent", &["delete", "pod", "steady"]),
            ("tessera-agent", &["get", "secrets", "-n", NAMESPACE]),
            ("tessera-scheduler", &["get", "secrets", "-n", NAMESPACE]),
            ("tessera-scheduler", &["annotate", "pod", "steady", "tessera.dev/grant=x", "--overwrite"]),
            ("tessera-scheduler", &["label", "node", "node-1", "a=b"]),
        ];
        for (account, request) in cases {
            let user = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
            let Err(refusal) = self.cluster().kubectl(&[&[user.as_str()], request].concat()).await else {
                bail!("{account} may {}", request.join(" "));
            };
            ensure!(refusal.to_string().contains("orbidden"), "{account}: {refusal:#}");
        }
        self.note("verbs that are not granted are refused");
        Ok(())
    }

    /// Changes the scheduler and goes back while pods with shares come and go. All of them run.
    async fn upgrade_scheduler(&self) -> Result<()> {
        let before = self.pods_of("tessera-scheduler").await?;
        ensure!(before.len() == 2, "{before:?}");
        let made = self
            .under_load("first", async || {
                self.install(&["scheduler.extraArgs={--no-events}"]).await?;
                let after = self.pods_of("tessera-scheduler").await?;
                ensure!(after.keys().all(|pod| !before.contains_key(pod)), "some replicas were not replaced");
                self.rollback("1").await
            })
            .await?;
        self.note(&format!("scheduler upgraded and rolled back: {made}"));
        Ok(())
    }

    /// Upgrades everything to another image and goes back while pods with shares come and go. The kubelet rejects none of
    /// them, although no agent runs for some seconds. Running pods run on.
    async fn upgrade_all(&self) -> Result<()> {
        let before = self.pods_of("tessera").await?;
        let made = self
            .under_load("second", async || {
                self.install(&["image.tag=two"]).await?;
                let after = self.pods_of("tessera").await?;
                ensure!(after.values().all(|image| image.ends_with(":two")), "{after:?}");
                self.rollback("1").await?;
                let again = self.pods_of("tessera").await?;
                ensure!(again.values().all(|image| image.ends_with(":one")), "{again:?}");
                ensure!(again.keys().all(|pod| !before.contains_key(pod)), "some pods were not replaced");
                Ok(())
            })
            .await?;
        let steady = self.cluster().pods().get("steady").await?.status.unwrap_or_default();
        let restarts =
            steady.container_statuses.unwrap_or_default().iter().map(|c| c.restart_count).sum::<i32>();
        ensure!(steady.phase.as_deref() == Some("Running") && restarts == 0, "steady: {:?}", steady.phase);
        self.note(&format!("agent and scheduler upgraded and rolled back: {made}; the steady pod ran on"));
        Ok(())
    }

    async fn rollback(&self, revision: &str) -> Result<()> {
        let back = ["rollback", RELEASE, revision, "--namespace", NAMESPACE, "--wait", "--timeout", "150s"];
        self.cluster().helm(&back).await?;
        self.note("helm rollback: all is ready");
        Ok(())
    }

    /// Makes pods without a controller until `changes` are done, and compares their GPUs. All of them must have run.
    /// Returns what happened.
    async fn under_load(&self, name: &str, changes: impl AsyncFnOnce() -> Result<()>) -> Result<String> {
        let (stop, is_over, made) = (Cell::new(false), Cell::new(false), Cell::new(0));
        let load = async {
            while !stop.get() {
                // The pods overlap, so that several share a GPU.
                let one = pod(&format!("load-{name}-{:03}", made.get()), "exec sleep 3", &SMALL);
                self.site.make(&disruptions::tolerating(one)).await?;
                made.set(made.get() + 1);
                tokio::time::sleep(LOAD_INTERVAL).await;
            }
            Ok::<_, anyhow::Error>(())
        };
        let changes = async {
            let outcome = changes().await;
            stop.set(true);
            outcome
        };
        let work = async {
            let (loaded, changed) = tokio::join!(load, changes);
            let outcome = match changed.and(loaded) {
                Ok(()) => self.all_ran(name, made.get()).await,
                failed => failed,
            };
            is_over.set(true);
            outcome
        };
        let (worked, compared) = tokio::join!(work, self.compare_gpus(&is_over));
        // What the comparison found may be the reason why pods did not end.
        let (mut compared, made) = (compared?, made.get());
        worked?;
        compared.pods.retain(|pod| pod.starts_with("load-"));
        ensure!(compared.pods.len() * 2 > made, "only {} of {made} pods were compared", compared.pods.len());
        Ok(format!(
            "all {made} pods ran; {} comparisons with {} of them: each held the GPU it was granted, none a device of \
             another, and no GPU was over 100 % or its memory",
            compared.rounds,
            compared.pods.len()
        ))
    }

    /// Returns our pods and their images.
    async fn pods_of(&self, prefix: &str) -> Result<BTreeMap<String, String>> {
        let pods: Api<Pod> = Api::namespaced(self.cluster().client(), NAMESPACE);
        let ours = pods.list(&ListParams::default()).await?.items.into_iter();
        let ours = ours.filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let named = ours.filter_map(|pod| {
            let image = pod.spec?.containers.first()?.image.clone()?;
            Some((pod.metadata.name?, image))
        });
        Ok(named.filter(|(name, _)| name.starts_with(prefix)).collect())
    }

    /// Waits until all pods of the load have ended well.
    async fn all_ran(&self, load: &str, count: usize) -> Result<()> {
        let pods = self.cluster().pods();
        let all = self
            .site
            .harness
            .wait_for(&format!("{count} pods to have ended"), Duration::from_secs(120), async || {
                let mut all = pods.list(&ListParams::default()).await?.items;
                all.retain(|pod| name(pod).starts_with(&format!("load-{load}-")));
                let ended = all.iter().filter(|pod| matches!(phase(pod), "Succeeded" | "Failed")).count();
                ensure!(ended == count, "{ended} of {count} pods have ended");
                Ok(Some(all))
            })
            .await?;
        for pod in all {
            ensure!(phase(&pod) == "Succeeded", "{} failed: {:?}", name(&pod), pod.status);
        }
        Ok(())
    }

    /// Installs a second kube-scheduler, with the policy of this version of Kubernetes and with the webhook for older
    /// ones, then with GPUs by CDI. Pods that ask for GPUs get it without naming it, unless they opt out.
    async fn second_scheduler(&self) -> Result<()> {
        let _own = self.cluster().start_scheduler("kube-scheduler-of-cluster", json!({}))?;
        let repository = "e2e.invalid/kube-scheduler";
        for node in [&self.node, &self.plain_node] {
            self.site.harness.load_kube_scheduler_image(node, &format!("{repository}:{KUBERNETES}"))?;
        }
        let image = format!("scheduler.kubeScheduler.repository={repository}");
        // From here on a discovery tool has found the GPUs, and the node is of no pool.
        let (of_pool, _) = OF_POOL.split_once('=').context("no label")?;
        let unlabel = format!("{of_pool}-");
        self.cluster().kubectl(&["label", "node", &self.node.name, FOUND, &unlabel]).await?;
        self.describe_gpus()?;
        let by_cdi = "agent.extraArgs={--gpus=simulated:/etc/e2e/gpus.json,--device-list-strategy=cdi-cri}";
        // Claims are served in one of the two ways.
        for (by, others, of_claims) in
            [("policy", "scheduler.dra=true", "tessera"), ("webhook", by_cdi, "default-scheduler")]
        {
            self.wait_for_name("default-scheduler").await?;
            let by_value = format!("scheduler.schedulerNameBy={by}");
            self.install(&["scheduler.mode=second", &image, &by_value, others]).await?;
            Box::pin(self.name_is_set(by, of_claims)).await?;
            let made = Box::pin(self.under_load(by, async || {
                self.install(&["scheduler.mode=second", &image, &by_value, others, "image.tag=two"]).await?;
                self.rollback("1").await
            }))
            .await?;
            self.note(&format!("second scheduler by {by} upgraded and rolled back: {made}"));
            self.uninstall().await?;
            self.remove_traces().await?;
        }
        Ok(())
    }

    /// Describes the GPUs to the node's container runtime, as NVIDIA's toolkit does. An agent that is told to passes GPUs
    /// and library by CDI then.
    fn describe_gpus(&self) -> Result<()> {
        let device =
            |uuid: &str| json!({ "name": uuid, "containerEdits": { "env": [format!("E2E_GPU={uuid}")] } });
        let devices: Vec<Value> = eight_gpus().gpus.iter().map(|gpu| device(&gpu.uuid.0)).collect();
        let described = json!({ "cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices });
        fs::write(self.node.cdi().join("nvidia.json"), described.to_string())?;
        Ok(())
    }

    /// Waits until a pod that asks for GPUs and names no scheduler would get this one. The API server follows new and
    /// deleted policies after a moment.
    async fn wait_for_name(&self, scheduler: &str) -> Result<()> {
        let probe = PostParams { dry_run: true, ..PostParams::default() };
        self.site
            .harness
            .wait_for(&format!("pods with GPUs to get schedulerName {scheduler}"), SOON, async || {
                let made = self.cluster().pods().create(&probe, &pod("probe", "true", &SMALL)).await?;
                Ok((scheduler_of(&made) == scheduler).then_some(()))
            })
            .await
    }

    /// Checks which pods get the second kube-scheduler, and that one of them runs. Pods with claims get `of_claims`.
    async fn name_is_set(&self, by: &str, of_claims: &str) -> Result<()> {
        self.wait_for_name("tessera").await?;
        let pods = self.cluster().pods();
        let mut out = pod("opted-out", "true", &SMALL);
        out.metadata.labels = Some([("tessera.dev/scheduler".to_owned(), "default".to_owned())].into());
        let mut named = pod("named", "true", &SMALL);
        if let Some(spec) = &mut named.spec {
            spec.scheduler_name = Some("another".to_owned());
        }
        let mut claiming = pod("claiming", "true", &[]);
        if let Some(spec) = &mut claiming.spec {
            let claim = PodResourceClaim {
                name: "gpu".to_owned(),
                resource_claim_name: Some("small".to_owned()),
                ..PodResourceClaim::default()
            };
            spec.resource_claims = Some(vec![claim]);
        }
        let mut out_claiming = claiming.clone();
        out_claiming.metadata.labels.clone_from(&out.metadata.labels);
        let probe = PostParams { dry_run: true, ..PostParams::default() };
        self.namespace_opts_out(&probe).await?;
        for (other, expected) in [
            (pod("plain", "true", &[]), "default-scheduler"),
            (out, "default-scheduler"),
            (named, "another"),
            (claiming, of_claims),
            (out_claiming, "default-scheduler"),
        ] {
            let made = pods.create(&probe, &other).await?;
            ensure!(scheduler_of(&made) == expected, "{} has {}", name(&made), scheduler_of(&made));
        }
        let unmodified = format!("unmodified-{by}");
        self.share_runs(&unmodified).await?;
        let bound = pods.get(&unmodified).await?;
        ensure!(scheduler_of(&bound) == "tessera", "bound by {}", scheduler_of(&bound));
        self.helm_test().await?;
        self.note(&format!(
            "second scheduler by {by}: unmodified pods get it; others, named and those that opted out do not"
        ));
        Ok(())
    }

    /// Pods of a namespace with the label keep the scheduler of the cluster as soon as the API server has seen the label.
    async fn namespace_opts_out(&self, probe: &PostParams) -> Result<()> {
        let namespace = "opted-out";
        // The namespace exists in the second round.
        let _ = self.cluster().kubectl(&["create", "namespace", namespace]).await;
        let label = "tessera.dev/scheduler=default";
        self.cluster().kubectl(&["label", "namespace", namespace, label, "--overwrite"]).await?;
        let pods: Api<Pod> = Api::namespaced(self.cluster().client(), namespace);
        self.site
            .harness
            .wait_for("pods of a namespace that opts out to keep their scheduler", SOON, async || {
                let made = pods.create(probe, &pod("opted-out", "true", &SMALL)).await?;
                Ok((scheduler_of(&made) == "default-scheduler").then_some(()))
            })
            .await
    }

    /// Uninstalls: pods with GPUs run on, and nothing of ours is left but what the documentation tells to remove.
    async fn uninstall(&self) -> Result<()> {
        self.cluster()
            .helm(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "60s"])
            .await?;
        let kinds = self.cluster().kubectl(&["api-resources", "--verbs=list", "-o", "name"]).await?;
        let kinds: Vec<&str> = kinds.lines().filter(|kind| !kind.starts_with("events")).collect();
        let all = ["get", &kinds.join(","), "--all-namespaces", "--ignore-not-found", "-o", "json"];
        // Pods that Helm has not waited for may still be ending.
        self.site
            .harness
            .wait_for("everything to be removed", SOON, async || {
                let all: Value = serde_json::from_str(&self.cluster().kubectl(&all).await?)?;
                let all = all["items"].as_array().context("no objects")?;
                let left: Vec<String> = all.iter().filter_map(of_tessera).collect();
                ensure!(left.is_empty(), "left: {left:?}");
                Ok(Some(()))
            })
            .await?;
        let steady = self.cluster().pods().get("steady").await?.status.unwrap_or_default();
        ensure!(steady.phase.as_deref() == Some("Running"), "the pod with a share ended: {:?}", steady.phase);
        self.note("uninstalled: the pod with a share runs on, no object is left");
        Ok(())
    }
}

/// Returns kind and name of an object that the installation made, by its name or its labels. Pods elsewhere belong to
/// users.
fn of_tessera(object: &Value) -> Option<String> {
    let (kind, meta) = (object["kind"].as_str()?, &object["metadata"]);
    let name = meta["name"].as_str()?;
    let is_of_users = matches!(kind, "Pod" | "PodMetrics") && meta["namespace"] != NAMESPACE;
    let labels = meta["labels"].as_object().into_iter().flat_map(|labels| labels.values());
    let mut words = labels.filter_map(Value::as_str).chain([name]);
    (words.any(|word| word.contains("tessera")) && !is_of_users).then(|| format!("{kind} {name}"))
}

fn scheduler_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.scheduler_name.as_deref()).unwrap_or_default()
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}
