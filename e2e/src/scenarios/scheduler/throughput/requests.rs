//! The requests that the API server and our extender have answered, by their own count.

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Context, Result};

use super::super::{Site, front};

/// Requests per pod below which a kind of request is not reported.
const FEW: f64 = 0.05;

/// Number and total duration in seconds of requests, by verb and resource.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct ApiRequests(BTreeMap<String, (f64, f64)>);

impl ApiRequests {
    pub(super) async fn read(site: &Site) -> Result<Self> {
        let request = axum::http::Request::get("/metrics").body(Vec::new())?;
        Ok(Self::parse(&site.cluster.client().request_text(request).await?))
    }

    fn parse(metrics: &str) -> Self {
        let mut all = Self::default();
        for line in metrics.lines() {
            let Some(rest) = line.strip_prefix("apiserver_request_duration_seconds_") else { continue };
            let Some((family, rest)) = rest.split_once('{') else { continue };
            let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
            let value: f64 = value.parse().unwrap_or_default();
            let label = |name: &str| {
                let begin = format!("{name}=\"");
                labels
                    .split(',')
                    .find_map(|label| label.strip_prefix(&*begin)?.strip_suffix('"'))
                    .unwrap_or("")
            };
            let part = label("subresource");
            let part = if part.is_empty() { String::new() } else { format!("/{part}") };
            let (count, seconds) =
                all.0.entry(format!("{} {}{part}", label("verb"), label("resource"))).or_default();
            match family {
                "count" => *count += value,
                "sum" => *seconds += value,
                _ => {}
            }
        }
        all
    }

    /// Describes the requests since `before`: their number per pod and their mean duration.
    pub(super) fn since(&self, before: &Self, pods: f64) -> String {
        let mut lines = Vec::new();
        for (kind, (count, seconds)) in &self.0 {
            let (count_before, seconds_before) = before.0.get(kind).copied().unwrap_or_default();
            let (count, seconds) = (count - count_before, seconds - seconds_before);
            // A watch lasts as long as the measurement.
            if count / pods >= FEW && !kind.starts_with("WATCH") {
                lines.push(format!("{kind} {:.2} of {:.1} ms", count / pods, seconds / count * 1000.0));
            }
        }
        lines.join(", ")
    }
}

/// Describes the calls that our extender has answered, by its own count: their number per pod and their mean
/// duration.
pub(super) async fn extender_calls(address: SocketAddr, pods: f64) -> Result<String> {
    let page = front::get(address, "/metrics").await.context("the extender serves no metrics")?;
    let mut calls: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for line in page.lines() {
        let Some(rest) = line.strip_prefix("tessera_scheduler_call_seconds_") else { continue };
        let Some((family, rest)) = rest.split_once("{verb=\"") else { continue };
        let Some((verb, value)) = rest.split_once("\"} ") else { continue };
        let entry = calls.entry(verb.to_owned()).or_default();
        match family {
            "count" => entry.0 = value.trim().parse()?,
            "sum" => entry.1 = value.trim().parse()?,
            _ => {}
        }
    }
    let calls = calls.iter().filter(|(_, (count, _))| *count > 0.0).map(|(verb, (count, seconds))| {
        format!("{verb} {:.2} of {:.3} ms", count / pods, seconds / count * 1000.0)
    });
    Ok(calls.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_requests_by_verb_and_resource() {
        let family = "apiserver_request_duration_seconds";
        let labels = r#"component="apiserver",resource="pods",subresource="binding",verb="POST""#;
        let page = |count, sum| {
            ApiRequests::parse(&format!(
                "{family}_bucket{{{labels},le=\"0.1\"}} 3\n{family}_sum{{{labels}}} {sum}\n\
                 {family}_count{{{labels}}} {count}\nother 1\n"
            ))
        };
        assert_eq!(page(15, 0.35).since(&page(5, 0.05), 10.0), "POST pods/binding 1.00 of 30.0 ms");
        assert_eq!(page(15, 0.35).since(&page(15, 0.35), 10.0), "");
    }
}
