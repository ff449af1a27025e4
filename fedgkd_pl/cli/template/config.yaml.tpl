# One run: fedgkd-pl fit --import my_project --config config.yaml
name: my-project # runs/my-project/version_0, version_1, ...
rounds: 20
seed_everything: 0
trainer:
  gradient_clip_val: 10 # of the clients
model:
  class_path: my_project.MyMethod # or one that comes with the package, such as FedGKD
  init_args:
    gamma: 1.0
    net:
      class_path: my_project.MyNet
      init_args: { hidden: 64 }
    local_epochs: 3
    optimizer:
      class_path: torch.optim.SGD
      init_args: { lr: 0.05, momentum: 0.9 }
    engine:
      class_path: LocalEngine
      init_args: { workers: 1 } # the work is too small for more processes
data:
  class_path: my_project.MyData # or CSVTable, ImageFolders, ...: see my_project/data.py
  init_args:
    num_clients: 10
    participation: 0.4 # four clients a round
    batch_size: 16
    partition:
      class_path: Dirichlet # clients hold classes in different shares: the smaller α, the more so
      init_args: { alpha: 0.3 }
