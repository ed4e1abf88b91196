//! Pods with an extender and a kube-scheduler each, as `deploy/scheduler-second` sets them up. One of each pair, or
//! both, are killed while pods are bound. A program in a UTS namespace of its own stands for a container of a pod, and
//! a shell that starts it again for the kubelet.

use std::{
    fs,
    net::SocketAddr,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    coordination::v1::Lease,
    core::v1::{Node, Pod},
};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use tessera_cluster::LeanPod;
use tokio::net::TcpStream;

use super::{SOON, Site, USER, audit::Audit, deploy, front, pods::gpu_node, pods::share};
use crate::harness::{Cluster, Component, Harness, Parts, free_port};

const FILE: &str = "scheduler-second/kube-scheduler.yaml";
/// Leases of kube-scheduler and of the extender.
const LEASES: [&str; 2] = ["tessera-kube-scheduler", "tessera-scheduler"];
/// Pods created before each kill, so that binds are under way.
const LOAD: usize = 40;
/// Longest time from a kill until a pod is bound, on a host that other programs use too.
const MAX_GAP: Duration = Duration::from_secs(15);
/// An address of the enclosure besides loopback, as other pods see it.
const OUTSIDE: [u8; 4] = [10, 99, 0, 1];

struct Pair {
    host: String,
    extender: Component,
    kube_scheduler: Component,
    verbs: u16,
    pages: SocketAddr,
    health: SocketAddr,
}

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let cluster = Cluster::start(&harness, Parts { scheduler: true, controllers: false }).await?;
    let nodes = (0..20).map(|number| gpu_node(&format!("node-{number:02}"), 4, "GiB"));
    cluster.create_all(&Api::<Node>::all(cluster.client()), nodes).await?;
    let site = Site { harness: harness.clone(), cluster: cluster.into() };
    // Everything but the pods: no controller runs.
    let admin = site.cluster.kubeconfig("admin", "system:masters")?;
    let folder = deploy().join("scheduler-second");
    let applied =
        Command::new("kubectl").args(["apply", "-k"]).arg(folder).env("KUBECONFIG", admin).output()?;
    ensure!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    site.cluster.wait_for_rights(USER).await?;
    site.check_rights().await?;
    let outside = std::net::Ipv4Addr::from(OUTSIDE).to_string();
    let added =
        Command::new("ip").args(["address", "add", &format!("{outside}/32"), "dev", "lo"]).status()?;
    ensure!(added.success(), "cannot add an address");
    let pairs = [site.pair("pod-a", "127.0.0.1")?, site.pair("pod-b", "127.0.0.1")?];
    let leader = site.leader(&pairs, "").await?;
    harness.note(&format!("{} leads with both of its programs", leader.host));
    site.check_doors(&pairs).await?;
    site.make(&named("first", 10)).await?;
    let event = {
        site.bound("first").await?;
        site.event_about("first", "Scheduled").await?
    };
    let by = event.reporting_component.unwrap_or_default();
    ensure!(by == "tessera", "the pod was bound by {by:?}");

    site.gap(&pairs, "kube-scheduler", |pair| pair.kube_scheduler.kill()).await?;
    site.gap(&pairs, "extender", |pair| {
        pair.extender.kill()?;
        // The kubelet starts it again at once.
        pair.extender.start_again()
    })
    .await?;
    site.gap(&pairs, "both", |pair| pair.kube_scheduler.kill().and_then(|()| pair.extender.kill())).await?;
    site.extender_does_not_return(&pairs).await?;
    site.audit().await
}

impl Site {
    /// Checks that the account of both programs has no right to Secrets, and may change no pods and nodes.
    async fn check_rights(&self) -> Result<()> {
        let reviews: Api<SubjectAccessReview> = Api::all(self.cluster.client());
        for (verb, resource) in
            [("get", "secrets"), ("patch", "pods"), ("update", "pods"), ("patch", "nodes")]
        {
            let attributes = ResourceAttributes {
                namespace: Some("kube-system".to_owned()),
                resource: Some(resource.to_owned()),
                verb: Some(verb.to_owned()),
                ..ResourceAttributes::default()
            };
            let review = SubjectAccessReview {
                spec: SubjectAccessReviewSpec {
                    user: Some(USER.to_owned()),
                    resource_attributes: Some(attributes),
                    ..SubjectAccessReviewSpec::default()
                },
                ..SubjectAccessReview::default()
            };
            let status =
                reviews.create(&PostParams::default(), &review).await?.status.context("no answer")?;
            ensure!(!status.allowed, "the account may {verb} {resource}");
        }
        Ok(())
    }

    fn pair(&self, host: &str, address: &str) -> Result<Pair> {
        let kubeconfig = self.cluster.kubeconfig(USER, "e2e")?.display().to_string();
        let free = || Ok::<_, anyhow::Error>(SocketAddr::from(([0, 0, 0, 0], free_port()?)));
        let (verbs, pages, health) = (free_port()?, free()?, free()?);
        let extender = self.harness.tessera()?.arguments([
            "scheduler".to_owned(),
            format!("--verbs-on-loopback={verbs}"),
            "--neighbour-lease=tessera-kube-scheduler".to_owned(),
            "--scheduler-name=tessera".to_owned(),
            format!("--dashboard-listen={pages}"),
            format!("--health-listen={health}"),
            format!("--kubeconfig={kubeconfig}"),
        ]);
        let extender = extender.environment("POD_IP", address).environment("HOST_IP", "192.0.2.1");
        let shipped = "http://127.0.0.1:12345";
        let configuration = shipped_configuration()?;
        ensure!(configuration.contains(shipped), "the shipped configuration does not name {shipped}");
        let configuration = configuration.replace(shipped, &format!("http://127.0.0.1:{verbs}"))
            + &format!("clientConnection:\n  kubeconfig: {kubeconfig}\n");
        let name = format!("{host}-kube-scheduler");
        let kube_scheduler = self.cluster.scheduler_program(&name, &configuration, &kubeconfig)?;
        Ok(Pair {
            host: host.to_owned(),
            extender: self.harness.start(&format!("{host}-extender"), extender.in_pod(host))?,
            kube_scheduler: self.harness.start(&name, kube_scheduler.in_pod(host))?,
            verbs,
            pages,
            health,
        })
    }

    /// Waits until the same pair, another than `not`, holds both leases and is ready.
    async fn leader<'p>(&self, pairs: &'p [Pair], not: &str) -> Result<&'p Pair> {
        let leases: Api<Lease> = Api::namespaced(self.cluster.client(), "kube-system");
        self.harness
            .wait_for("one pair to lead", SOON, async || {
                let mut hosts = Vec::new();
                for name in LEASES {
                    let spec = leases.get(name).await?.spec.unwrap_or_default();
                    let holder = spec.holder_identity.unwrap_or_default();
                    hosts.push(holder.split('_').next().unwrap_or_default().to_owned());
                }
                let pair = pairs.iter().find(|pair| hosts.iter().all(|host| *host == pair.host));
                let Some(pair) = pair.filter(|pair| pair.host != not) else {
                    bail!("the leases name {hosts:?}")
                };
                Ok(front::is_ready(pair.health).await.then_some(pair))
            })
            .await
    }

    /// Checks that only loopback serves the verbs, that both pairs are ready, and that both show the dashboard.
    async fn check_doors(&self, pairs: &[Pair]) -> Result<()> {
        for pair in pairs {
            let reachable = async |address: [u8; 4], port| {
                TcpStream::connect((std::net::IpAddr::from(address), port)).await.is_ok()
            };
            ensure!(reachable([127, 0, 0, 1], pair.verbs).await, "{}: no verbs on loopback", pair.host);
            ensure!(
                !reachable(OUTSIDE, pair.verbs).await,
                "{}: the verbs are reachable from outside",
                pair.host
            );
            ensure!(
                reachable(OUTSIDE, pair.pages.port()).await,
                "{}: the pages are not reachable",
                pair.host
            );
            let what = format!("{} to be ready and to show the leader's pages", pair.host);
            self.harness
                .wait_for(&what, SOON, async || {
                    let local = SocketAddr::from(([127, 0, 0, 1], pair.pages.port()));
                    let text = front::get(local, "/api/v1/status").await.context("no answer")?;
                    ensure!(text.contains("\"ready\":true"), "{text}");
                    Ok(front::is_ready(pair.health).await.then_some(()))
                })
                .await?;
        }
        self.harness.note(
            "outside callers reach the pages, not the verbs; both pairs are ready and show the cluster",
        );
        Ok(())
    }

    /// Kills something of the leading pair, measures the time until the next pod is bound, and starts again what is
    /// missing.
    async fn gap(&self, pairs: &[Pair], what: &str, kill: impl Fn(&Pair) -> Result<()>) -> Result<()> {
        let leader = self.leader(pairs, "").await?;
        let load = (0..LOAD).map(|number| named(&format!("load-{what}-{number:02}"), 10));
        self.cluster.create_all(&self.cluster.pods(), load).await?;
        kill(leader)?;
        let killed = Instant::now();
        let name = format!("after-{what}");
        self.make(&named(&name, 10)).await?;
        self.bound(&name).await?;
        let took = killed.elapsed();
        ensure!(took < MAX_GAP, "{what} killed: the next pod was bound after {took:?}");
        for number in 0..LOAD {
            self.bound(&format!("load-{what}-{number:02}")).await?;
        }
        let next = self.leader(pairs, "").await?;
        self.harness.note(&format!(
            "{what} of {} killed: a new pod is bound after {:.1} s, {} leads",
            leader.host,
            took.as_secs_f64(),
            next.host
        ));
        for component in [&leader.extender, &leader.kube_scheduler] {
            if component.id().is_none() {
                component.start_again()?;
            }
        }
        Ok(())
    }

    /// An extender that stays away takes its kube-scheduler down: the probe fails, and the other pair leads.
    async fn extender_does_not_return(&self, pairs: &[Pair]) -> Result<()> {
        let leader = self.leader(pairs, "").await?;
        leader.extender.kill()?;
        let killed = Instant::now();
        let probe = front::get(leader.health, "/healthz/kube-scheduler").await;
        ensure!(probe.is_none(), "the probe of kube-scheduler was answered: {probe:?}");
        // The kubelet stops a container whose probe fails.
        leader.kube_scheduler.stop().await?;
        let next = self.leader(pairs, &leader.host).await?;
        self.make(&named("after-probe", 10)).await?;
        self.bound("after-probe").await?;
        self.harness.note(&format!(
            "kube-scheduler stopped because its extender stays away: {} binds after {:.1} s",
            next.host,
            killed.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    /// Checks that no GPU has more than it can hold, and that no kube-scheduler lost its lease without a kill.
    async fn audit(&self) -> Result<()> {
        let pods: Api<LeanPod> = Api::default_namespaced(self.cluster.client());
        let mut audit = Audit::default();
        for pod in pods.list(&ListParams::default()).await?.items {
            audit.see(&pod)?;
        }
        let mut lost = 0;
        for (_, log) in self.harness.components().logs() {
            lost += fs::read_to_string(log)?.matches("Leaderelection lost").count();
        }
        self.harness.note(&format!(
            "{} pods bound, no GPU overbooked; kube-schedulers that could not renew their lease: {lost}",
            audit.pods()
        ));
        ensure!(audit.pods() == 3 * LOAD + 5, "{} pods are bound", audit.pods());
        Ok(())
    }
}

/// Returns a pod for the second kube-scheduler.
fn named(name: &str, compute_percent: u64) -> Pod {
    let mut pod = share(name, compute_percent);
    if let Some(spec) = &mut pod.spec {
        spec.scheduler_name = Some("tessera".to_owned());
    }
    pod
}

/// Returns the configuration in the ConfigMap.
fn shipped_configuration() -> Result<String> {
    let text = fs::read_to_string(deploy().join(FILE)).context(FILE)?;
    let block = text.split_once("configuration.yaml: |\n").context("no configuration")?.1;
    Ok(block.lines().map_while(|line| Some(format!("{}\n", line.strip_prefix("    ")?))).collect())
}
