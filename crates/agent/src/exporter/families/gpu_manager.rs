//! The four families of gpu-manager. Labels are in alphabetical order, as its client library writes
//! them.

use tessera_wire::metrics::{Labels, MetricKind::Gauge, MetricsPage};

use crate::exporter::{
    ContainerSnapshot, ShareSnapshot, Snapshot,
    usage::{mebibytes, request},
};

pub(super) fn write(snapshot: &Snapshot, page: &mut MetricsPage) {
    let holders: Vec<&ContainerSnapshot> =
        snapshot.containers.iter().filter(|c| c.shares.iter().any(|share| share.hold.is_some())).collect();
    let used = |share: &ShareSnapshot| share.used.map(mebibytes);
    let busy = |share: &ShareSnapshot| share.busy.map(|busy| (busy * 1e4).round() / 100.0);
    by_gpu(snapshot, page, &holders, ("container_gpu_utilization", "gpu utilization", "gpu"), busy);
    by_gpu(
        snapshot,
        page,
        &holders,
        ("container_gpu_memory_total", "gpu memory usage in MiB", "gpu_memory"),
        used,
    );
    let mut compute_percent =
        page.family("container_request_gpu_utilization", Gauge, "request of gpu utilization");
    for container in &holders {
        compute_percent
            .sample(&request_labels(snapshot, container, "req_of_gpu"), request(snapshot, container).0);
    }
    let mut memory = page.family("container_request_gpu_memory", Gauge, "request of gpu memory in MiB");
    for container in &holders {
        memory.sample(
            &request_labels(snapshot, container, "req_of_gpu_memory"),
            request(snapshot, container).1,
        );
    }
}

/// Writes a value for each GPU, and their sum.
fn by_gpu(
    snapshot: &Snapshot,
    page: &mut MetricsPage,
    holders: &[&ContainerSnapshot],
    (name, help, label): (&str, &str, &str),
    value: impl Fn(&ShareSnapshot) -> Option<f64>,
) {
    let mut family = page.family(name, Gauge, help);
    for container in holders {
        let labels = |which: &str| {
            Labels::new(&[
                ("container_name", &container.key.container),
                (label, which),
                ("namespace", &container.namespace),
                ("node", &snapshot.node),
                ("pod_name", &container.pod),
            ])
        };
        for share in &container.shares {
            family.sample(&labels(&format!("gpu{}", share.gpu)), value(share));
        }
        let total: Option<f64> = container.shares.iter().map(&value).sum();
        family.sample(&labels("total"), total);
    }
}

fn request_labels(snapshot: &Snapshot, container: &ContainerSnapshot, label: &str) -> Labels {
    Labels::new(&[
        ("container_name", &container.key.container),
        ("namespace", &container.namespace),
        ("node", &snapshot.node),
        ("pod_name", &container.pod),
        (label, "total"),
    ])
}
