//! Checks that `docs/scheduler.md` and the scheduler name the same metrics.

#[path = "../../../tessera/tests/book/section.rs"]
mod section;

use std::collections::BTreeSet;
use std::time::Duration;

use tessera_scheduler::metrics::Metrics;

use tessera_scheduler::state::{State, StateEvent};
use tessera_serve::Tls;
use tessera_serve::authority::self_signed;
use tessera_wire::metrics::Format;

use crate::fixtures::{bind, node, state, whole};

#[test]
fn documentation_and_scheduler_name_the_same_metrics() {
    // The state sets a value in every metric family, because a family without a value is not
    // written.
    let mut state = state(&[node("n", 1, "GiB")]);
    bind(&mut state, &whole("p", 1), "n");
    let limits = r#"{"team":{"percent":100,"memoryMiB":1024,"guaranteed":{"percent":50,"memoryMiB":512}}}"#;
    state.handle(StateEvent::Quota(tessera_wire::foreign::quota::parse(limits, "the ConfigMap").unwrap()));
    let metrics = Metrics::default();
    metrics.answered("filter", "fits", Duration::ZERO);
    metrics.refused("quota", 1);
    metrics.bound("bound");
    metrics.evicted("accepted");
    metrics.claim_replaced(tessera_core::claim::Replacement::NoRoom);
    let made = self_signed("tessera", 1_800_000_000).unwrap();
    metrics.set_certificates("verbs", Tls::for_all(&made.certificate, &made.key).unwrap());
    let made = self_signed("tessera", 1_900_000_000).unwrap();
    metrics.set_certificates("webhook", Tls::for_all(&made.certificate, &made.key).unwrap());
    let unknown = metrics.text(None::<&State>, Format::Plain);
    for family in ["tessera_scheduler_pods_waiting", "tessera_scheduler_nodes", "tessera_gang_waiting"] {
        assert!(!unknown.contains(family), "a replica without the cluster's state does not know {family}");
    }
    assert!(unknown.contains("\ntessera_scheduler_leading 0\n"), "{unknown}");
    let text = metrics.text(Some(&state), Format::Plain);
    for line in [
        r#"tessera_certificate_expiry_timestamp_seconds{role="verbs",certificate="server"} 2115360000"#,
        r#"tessera_certificate_expiry_timestamp_seconds{role="webhook",certificate="server"} 2215360000"#,
        r#"hami_resource_quota_used{namespace="team",quota_name="nvidia.com/gpucores",limit="100",zone="vGPU"} 100"#,
        r#"hami_resource_quota_used{namespace="team",quota_name="nvidia.com/gpumem",limit="1024",zone="vGPU"} 16384"#,
        r#"hami_resource_quota_limit{namespace="team",quota_name="nvidia.com/gpumem",zone="vGPU"} 1024"#,
    ] {
        assert!(text.lines().any(|written| written == line), "{line} in\n{text}");
    }
    let written: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect();
    section::check("docs/reference/metrics.md", "Scheduler", &section::families(&text));
    let page = include_str!("../../../../docs/scheduler.md");
    let (_, rest) = page.split_once("\n## Metrics\n").unwrap();
    let (section, _) = rest.split_once("\n## ").unwrap();
    let names = section.split('`').skip(1).step_by(2).map(|span| span.split('{').next().unwrap());
    let told: BTreeSet<String> = names
        .map(|name| if name.starts_with('_') { format!("tessera_scheduler{name}") } else { name.to_owned() })
        .collect();
    assert_eq!(told, written);
}
