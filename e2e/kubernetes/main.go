// Command kubernetes is every server the end-to-end tests need, in one program: the first argument says which one to be.
// Nearly all packages are shared between them, so linking once is several times smaller and quicker than five programs.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"

	containerd "github.com/containerd/containerd/v2/cmd/containerd/command"
	ctr "github.com/containerd/containerd/v2/cmd/ctr/app"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "github.com/containerd/containerd/v2/cmd/containerd/builtins"
	_ "k8s.io/component-base/logs/json/register"
)

// Each part reads os.Args as if it were a program of its own and returns its exit status.
var parts = map[string]func() int{
	"containerd":              func() int { return status(containerd.App().Run(os.Args)) },
	"ctr":                     func() int { return status(ctr.New().Run(os.Args)) },
	"etcd":                    func() int { etcdmain.Main(os.Args); return 0 },
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllers.NewControllerManagerCommand()) },
	"kube-scheduler":          func() int { return cli.Run(scheduler.NewSchedulerCommand()) },
	"kubelet":                 func() int { return cli.Run(kubelet.NewKubeletCommand(context.Background())) },
}

func main() {
	if len(os.Args) > 1 {
		if run, found := parts[os.Args[1]]; found {
			os.Args = os.Args[1:]
			os.Exit(run())
		}
	}
	fmt.Fprintf(os.Stderr, "usage: %s PART [FLAG...], where PART is one of %v\n", os.Args[0], slices.Sorted(maps.Keys(parts)))
	os.Exit(2)
}

func status(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}
