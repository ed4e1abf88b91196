//! Runs the subcommands and prints their output.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use tessera_cluster::{Client, list};
use tessera_core::units::PodUid;
use tessera_wire::foreign::inspect::{ShareView, TopologyView};
use tessera_wire::tessera::explanation::PodExplanation;
use tessera_wire::tessera::{gang, placed_pod};

use crate::args::{
    Arguments, CliAction, Command, Defragment, Explain, OutputFormat, Overview, Top, Tree, View, WhatIf,
};
use crate::cordon::Direction;
use crate::defragment::{Situation, apply};
use crate::document::{self, Document};
use crate::follow::{follow, redraw};
use crate::options::{NodeSelection, SourceOptions};
use crate::paint::Paint;
use crate::plugin::Plugin;
use crate::share::ShareTable;
use crate::show::overview::OverviewForm;
use crate::survey::Survey;
use crate::table::{cut_lines, wrap_lines};
use crate::top::ClusterUse;
use crate::{cordon, defragment, endpoint, explain, load, print, show, usage, what_if};

/// The plugin and its output device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    pub(crate) plugin: Plugin,
    pub(crate) paint: Paint,
    pub(crate) terminal: bool,
    /// Columns of the terminal, or `None` if the output is piped.
    pub(crate) columns: Option<usize>,
}

impl Context {
    /// Cuts the lines of a view of nodes at the width of the terminal. Output for programs, such as YAML, is never cut.
    pub(crate) fn fitted_view(self, text: &str, view: &View) -> String {
        match view.output {
            Some(OutputFormat::Json | OutputFormat::Yaml | OutputFormat::Name) => text.to_owned(),
            Some(OutputFormat::Wide) | None => self.fitted(text),
        }
    }

    /// Wraps the lines of a text at the width of the terminal. Piped output is not wrapped.
    fn wrapped(self, text: &str) -> String {
        match self.columns {
            Some(columns) => wrap_lines(text, columns),
            None => text.to_owned(),
        }
    }

    /// Cuts the lines of a view at the width of the terminal. Piped output is not cut.
    fn fitted(self, text: &str) -> String {
        match self.columns {
            Some(columns) => cut_lines(text, columns),
            None => text.to_owned(),
        }
    }
}

pub(crate) async fn run(arguments: Arguments, context: Context) -> Result<ExitCode> {
    let Arguments { source, action } = arguments;
    match action {
        CliAction::List(view) => match &source.endpoint {
            Some(endpoint) => view_by_scheduler(endpoint, &source, &view, context).await,
            None => view_by_api(&source, &view, context).await,
        },
        CliAction::Run(Command::Explain(options)) => explain_pod(&source, &options, context).await,
        CliAction::Run(Command::WhatIf(options)) => what_if_pod(&source, &options, context).await,
        CliAction::Run(Command::Overview(options)) => overview(&source, &options, context).await,
        CliAction::Run(Command::Tree(options)) => tree(&source, &options, context).await,
        CliAction::Run(Command::Top(options)) => top(&source, &options, context).await,
        CliAction::Run(Command::Cordon(options)) => {
            print(&cordon::change(&source, &options, Direction::Cordon).await?);
            Ok(ExitCode::SUCCESS)
        }
        CliAction::Run(Command::Uncordon(options)) => {
            print(&cordon::change(&source, &options, Direction::Uncordon).await?);
            Ok(ExitCode::SUCCESS)
        }
        CliAction::Run(Command::Defragment(options)) => plan_moves(&source, &options, context).await,
    }
}

async fn view_by_api(source: &SourceOptions, view: &View, context: Context) -> Result<ExitCode> {
    let client = load::client(source).await?;
    let survey = load::survey(&client, source, &view.selection).await?;
    if let Some(problem) = report_empty(&survey, &view.selection, context.plugin) {
        problem?;
    }
    for (node, facts) in &survey.nodes {
        if let Some(problem) = &facts.problem {
            eprintln!("warning: node {node} cannot be read and is omitted: {problem}");
        }
        if let Some(problem) = &facts.bad_reservations {
            eprintln!("warning: node {node}: {problem}");
        }
    }
    if view.output == Some(OutputFormat::Json) && !view.watch {
        document::write_json(&Document::new(&survey, context.plugin == Plugin::Share))?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = render(&survey, view, context)?;
    if view.watch {
        return follow(client, source, view, context, text).await;
    }
    print(&context.fitted_view(&text, view));
    Ok(ExitCode::SUCCESS)
}

/// Reports that there is nothing to show. For a named node this is an error, for the whole cluster
/// a message. Returns `None` if there is something to show.
fn report_empty(survey: &Survey, selection: &NodeSelection, plugin: Plugin) -> Option<Result<()>> {
    let shown = match plugin {
        Plugin::Gpu => survey.with_gpus().count(),
        Plugin::Share => survey.sharing().count(),
    };
    if shown > 0 {
        return None;
    }
    let kind = if plugin == Plugin::Gpu { "GPU" } else { "GPU memory to share (aliyun.com/gpu-mem)" };
    if let (Some(node), Some(facts)) = (&selection.node, survey.nodes.values().next()) {
        return Some(Err(match &facts.problem {
            Some(problem) => anyhow!("node {node:?} cannot be read: {problem}"),
            None => anyhow!("node {node:?} offers no {kind}"),
        }));
    }
    let selector = selection.selector.as_ref().or(selection.field_selector.as_ref());
    if let Some(selector) = selector.filter(|_| survey.nodes.is_empty()) {
        eprintln!("No node matches {selector}.");
        return Some(Ok(()));
    }
    eprintln!("No node offers {kind}. A node offers it when a device plugin or an agent runs on it.");
    Some(Ok(()))
}

pub(crate) fn render(survey: &Survey, view: &View, context: Context) -> Result<String> {
    let headers = !view.no_headers;
    let sharing = context.plugin == Plugin::Share;
    Ok(match (view.output, context.plugin) {
        (Some(form @ (OutputFormat::Json | OutputFormat::Yaml)), _) => {
            document::print(&Document::new(survey, sharing), form)?
        }
        (Some(OutputFormat::Name), Plugin::Gpu) => {
            names(survey.with_gpus().map(|(_, state)| state.node().name.to_string()))
        }
        (Some(OutputFormat::Name), Plugin::Share) => {
            names(survey.sharing().map(|(_, state)| state.node().name.to_string()))
        }
        (Some(OutputFormat::Wide), Plugin::Gpu) => show::topology::wide(survey, headers),
        (None, Plugin::Gpu) if view.details => {
            show::topology::details(&show::topology::view(survey, true), Some(survey))
        }
        (None, Plugin::Gpu) if survey.with_gpus().next().is_none() => String::new(),
        (None, Plugin::Gpu) => show::topology::summary(&show::topology::view(survey, false), headers),
        (form, Plugin::Share) => share_text(&ShareTable::of(survey), view, form, context),
    })
}

fn share_text(table: &ShareTable, view: &View, form: Option<OutputFormat>, context: Context) -> String {
    if view.details {
        return show::share::details(table, context.columns);
    }
    let (headers, wide) = (!view.no_headers, form == Some(OutputFormat::Wide));
    show::share::summary(table, show::share::Columns { headers, wide, terminal: context.columns })
}

fn names(nodes: impl Iterator<Item = String>) -> String {
    nodes.map(|name| format!("node/{name}\n")).collect()
}

async fn view_by_scheduler(
    endpoint: &str,
    source: &SourceOptions,
    view: &View,
    context: Context,
) -> Result<ExitCode> {
    if view.watch || view.selection.selector.is_some() || view.selection.field_selector.is_some() {
        bail!("--endpoint shows all nodes once; remove --watch and the selectors, or --endpoint");
    }
    if context.plugin == Plugin::Gpu && view.output == Some(OutputFormat::Wide) {
        // Only the dashboard's API has what the columns show.
        let survey = endpoint::survey(endpoint, &view.selection).await?;
        if let Some(problem) = report_empty(&survey, &view.selection, context.plugin) {
            problem?;
        }
        print(&context.fitted_view(&render(&survey, view, context)?, view));
        return Ok(ExitCode::SUCCESS);
    }
    let node = view.selection.node.as_ref().map(|node| format!("/{node}")).unwrap_or_default();
    let text = match context.plugin {
        Plugin::Gpu => {
            let detail = if view.details || view.output.is_some() { "?detail=true" } else { "" };
            let path = format!("/inspect{node}{detail}");
            let mut found: TopologyView =
                load::from_scheduler(endpoint, "/gputopology-scheduler", &path).await?;
            found.nodes.sort_by(|a, b| a.name.cmp(&b.name));
            match view.output {
                Some(form @ (OutputFormat::Json | OutputFormat::Yaml)) => document::print(&found, form)?,
                Some(OutputFormat::Name) => names(found.nodes.into_iter().map(|node| node.name)),
                _ if view.details => {
                    // An extender of another project does not know MIG instances and reservations.
                    let survey = endpoint::survey(endpoint, &view.selection).await.inspect_err(|error| {
                        eprintln!(
                            "warning: MIG instances and reservations are unknown and not shown: {error:#}"
                        );
                    });
                    show::topology::details(&found, survey.as_ref().ok())
                }
                _ => show::topology::summary(&found, !view.no_headers),
            }
        }
        Plugin::Share => {
            let path = format!("/inspect{node}");
            let found: ShareView = load::from_scheduler(endpoint, "/gpushare-scheduler", &path).await?;
            match view.output {
                Some(form @ (OutputFormat::Json | OutputFormat::Yaml)) => document::print(&found, form)?,
                Some(OutputFormat::Name) => names(found.nodes.into_iter().map(|node| node.name)),
                form => share_text(&ShareTable::of_view(&found, load::unit(source)), view, form, context),
            }
        }
    };
    print(&context.fitted_view(&text, view));
    Ok(ExitCode::SUCCESS)
}

async fn explain_pod(source: &SourceOptions, options: &Explain, context: Context) -> Result<ExitCode> {
    let (namespace, name) = match options.pod.split_once('/') {
        Some(("pod" | "pods", name)) => (options.namespace.clone(), name),
        Some((namespace, name)) => (Some(namespace.to_owned()), name),
        None => (options.namespace.clone(), options.pod.as_str()),
    };
    let is_empty = name.is_empty() || namespace.as_deref() == Some("");
    if is_empty || name.contains('/') {
        bail!("{:?} is not a pod; write NAME or NAMESPACE/NAME", options.pod);
    }
    let answer = match &source.endpoint {
        Some(endpoint) => {
            let namespace = match namespace {
                Some(namespace) => namespace,
                None => load::default_namespace(source).await,
            };
            load::from_scheduler(endpoint, "", &format!("/explain/{namespace}/{name}")).await?
        }
        None => {
            let client = load::client(source).await?;
            let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
            let pod = load::pod(&client, &namespace, name).await?;
            if placed_pod::has_ended(&pod) {
                bail!("pod {namespace}/{name} has ended ({}) and holds nothing", pod.status.phase);
            }
            let mut survey = load::survey(&client, source, &NodeSelection::default()).await?;
            let holds_gpus = survey
                .grant(&PodUid(pod.metadata.uid.clone()))
                .is_some_and(|grant| !grant.containers.is_empty());
            let by_claims = PodExplanation::by_claims(&namespace, name, &survey.claims_of(&pod));
            if let Some(by_claims) = by_claims.filter(|_| !holds_gpus && !pod.spec.node_name.is_empty()) {
                return print_explanation(&by_claims, options, context);
            }
            let wants_gpus = pod.spec.asks_for_gpus() || !pod.spec.other_gpu_resources().is_empty();
            let waits_for_claims = pod.spec.node_name.is_empty() && !survey.waiting_claims(&pod).is_empty();
            if !wants_gpus && !waits_for_claims && !pod.spec.resource_claims.is_empty() {
                bail!(
                    "pod {namespace}/{name} gets its devices by claims; `kubectl inspect gpu overview -o wide` shows \
                     the GPUs that claims hold"
                );
            }
            if !wants_gpus && !waits_for_claims {
                bail!("pod {namespace}/{name} requests no GPU; `kubectl describe pod` shows why it waits");
            }
            if let Ok(Some(membership)) = gang::membership(&pod)
                && membership.size.is_none()
                && let Some(group) = list::pod_group(&client, &membership.gang).await
            {
                survey.set_pod_group(&group);
            }
            explain::explain(&survey, &pod, false)
                .with_context(|| format!("the GPU request of pod {namespace}/{name} is invalid"))?
        }
    };
    print_explanation(&answer, options, context)
}

fn print_explanation(answer: &PodExplanation, options: &Explain, context: Context) -> Result<ExitCode> {
    print(&match options.output {
        Some(form @ (OutputFormat::Json | OutputFormat::Yaml)) => document::print(answer, form)?,
        Some(OutputFormat::Name) => names(usable(answer)),
        form => context.wrapped(&show::explain::pod(answer, form == Some(OutputFormat::Wide), context.paint)),
    });
    Ok(ExitCode::SUCCESS)
}

/// Returns the names of the nodes whose GPUs would do, best first if the order is known.
fn usable(answer: &PodExplanation) -> impl Iterator<Item = String> + '_ {
    answer.best().into_iter().map(|view| view.node.clone())
}

async fn what_if_pod(source: &SourceOptions, options: &WhatIf, context: Context) -> Result<ExitCode> {
    what_if::pod("default", &options.request, &options.annotation)?;
    let answer = match &source.endpoint {
        Some(endpoint) => {
            let namespace = match &options.namespace {
                Some(namespace) => namespace.clone(),
                None => load::default_namespace(source).await,
            };
            let pod = what_if::pod(&namespace, &options.request, &options.annotation)?;
            load::post_to_scheduler(endpoint, "/what-if", &pod).await?
        }
        None => {
            let client = load::client(source).await?;
            let namespace =
                options.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
            let pod = what_if::pod(&namespace, &options.request, &options.annotation)?;
            let survey = load::survey(&client, source, &NodeSelection::default()).await?;
            explain::explain(&survey, &pod, true)?
        }
    };
    print(&match options.output {
        Some(form @ (OutputFormat::Json | OutputFormat::Yaml)) => document::print(&answer, form)?,
        Some(OutputFormat::Name) => names(usable(&answer)),
        form => {
            context.wrapped(&show::explain::what_if(&answer, form == Some(OutputFormat::Wide), context.paint))
        }
    });
    let fits = usable(&answer).next().is_some();
    Ok(if fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads the cluster from the API server, or with `--endpoint` from a scheduler. An endpoint without the API of
/// Tessera's scheduler, or one that does not answer, serves measurements only, and a warning says so. Only the API
/// server knows which nodes a selector matches.
async fn cluster(source: &SourceOptions, selection: &NodeSelection) -> Result<(Option<Client>, Survey)> {
    if let Some(endpoint) = &source.endpoint
        && selection.selector.is_none()
        && selection.field_selector.is_none()
    {
        match endpoint::survey(endpoint, selection).await {
            Ok(survey) => return Ok((None, survey)),
            Err(error) if error.is::<load::SchedulerRefusal>() => return Err(error),
            Err(error) => {
                eprintln!(
                    "warning: the API server is read, because --endpoint {endpoint} cannot be: {error:#}"
                );
            }
        }
    }
    let client = load::client(source).await?;
    let survey = load::survey(&client, source, selection).await?;
    Ok((Some(client), survey))
}

/// Columns of the overview if the output is piped and `COLUMNS` is not set.
const PIPED_COLUMNS: usize = 100;

async fn overview(source: &SourceOptions, options: &Overview, context: Context) -> Result<ExitCode> {
    let (_, survey) = cluster(source, &options.selection).await?;
    let typed = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let form = OverviewForm {
        columns: context.columns.or(typed).unwrap_or(PIPED_COLUMNS),
        wide: options.output.is_some(),
        now_seconds: load::now_seconds(),
        paint: context.paint,
    };
    if let Some(problem) = report_empty(&survey, &options.selection, Plugin::Gpu) {
        problem?;
        print(&show::overview::waiting_pods(&survey, form));
        return Ok(ExitCode::SUCCESS);
    }
    print(&show::overview::overview(&survey, form));
    Ok(ExitCode::SUCCESS)
}

async fn tree(source: &SourceOptions, options: &Tree, context: Context) -> Result<ExitCode> {
    let (client, survey) = cluster(source, &options.selection).await?;
    if let Some(problem) = report_empty(&survey, &options.selection, Plugin::Gpu) {
        problem?;
    }
    let used = match options.no_agents {
        true => Default::default(),
        false => usage::of_nodes(client.as_ref(), source, &survey).await,
    };
    for (node, answer) in &used {
        if let Err(error) = answer {
            eprintln!("warning: node {node}: the memory in use is unknown: {error}");
        }
    }
    for (_, state) in survey.with_gpus() {
        let used = used.get(&state.node().name.0).and_then(|answer| answer.as_ref().ok());
        print(&context.wrapped(&show::tree::node(&survey, state, used, options.output.is_some())));
    }
    Ok(ExitCode::SUCCESS)
}

async fn plan_moves(source: &SourceOptions, options: &Defragment, context: Context) -> Result<ExitCode> {
    let form = options
        .output
        .as_deref()
        .map(|form| if form == "yaml" { OutputFormat::Yaml } else { OutputFormat::Json });
    let client = defragment::client(source).await?;
    let situation = Situation::read(&client, source).await?;
    if options.release {
        let released = apply::release(&client, &situation).await?;
        print(&match form {
            Some(form) => document::print(&released, form)?,
            None => released.iter().map(|entry| format!("{entry} released\n")).collect(),
        });
        return Ok(ExitCode::SUCCESS);
    }
    let planned = situation.plan(options);
    let is_of_use = planned.view.is_of_use();
    if !options.apply || planned.view.moves.is_empty() {
        print(&match form {
            Some(form) => document::print(&planned.view, form)?,
            None => context.wrapped(&show::defragment::text(&planned.view)),
        });
        return Ok(if is_of_use { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let text = context.wrapped(&show::defragment::text(&planned.view));
    match form {
        Some(_) => eprint!("{text}"),
        None => print(&text),
    }
    if !options.yes && !apply::confirm(&planned.view)? {
        eprintln!("Nothing was changed.");
        return Ok(ExitCode::FAILURE);
    }
    let applied = apply::apply(&client, source, options, &situation, planned).await?;
    print(&match form {
        Some(form) => document::print(&applied, form)?,
        None => context.wrapped(&show::defragment::applied(&applied)),
    });
    Ok(if applied.done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn top(source: &SourceOptions, options: &Top, context: Context) -> Result<ExitCode> {
    let form = options
        .output
        .as_deref()
        .map(|form| if form == "yaml" { OutputFormat::Yaml } else { OutputFormat::Json });
    let refresh = context.terminal && !options.once && form.is_none();
    loop {
        let (client, survey) = cluster(source, &options.selection).await?;
        if let Some(problem) = report_empty(&survey, &options.selection, Plugin::Gpu) {
            problem?;
            return Ok(ExitCode::SUCCESS);
        }
        let usage =
            ClusterUse::new(usage::of_nodes(client.as_ref(), source, &survey).await, survey.gpu_memory());
        let order = show::top::Order { sort: options.sort, rows: options.rows };
        let text = match form {
            Some(form) => document::print(&usage, form)?,
            None => show::top::table(&usage, order, !options.no_headers, context),
        };
        let text = if form.is_some() { text } else { context.fitted(&text) };
        match refresh {
            true => redraw(&text, context),
            false => print(&text),
        }
        for (node, error) in usage.silent().filter(|_| form.is_none() && order.lists_containers()) {
            eprintln!("warning: node {node}: the use of its containers is unknown: {error}");
        }
        if !refresh {
            return Ok(ExitCode::SUCCESS);
        }
        tokio::time::sleep(Duration::from_secs(options.interval)).await;
    }
}
