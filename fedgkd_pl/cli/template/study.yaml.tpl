# MyMethod beside FedAvg and FedGKD; fedgkd-pl compare study.yaml --import my_project
name: study # runs/study; when your code has changed, take another: finished runs are kept
config: config.yaml # what all have in common
seeds: [0, 1]
measures: [best, final, last10]
rows: [method]
columns: [measure]
axes:
  method:
    FedAvg: { model: FedAvg }
    FedGKD: { model: FedGKD, model.gamma: 0.2, model.buffer_size: 5 }
    MyMethod: { model: my_project.MyMethod, model.gamma: 1.0 }
  # A second axis runs every method with each of its labels; then say rows: [alpha, method]
  # alpha:
  #   1: { data.partition.alpha: 1 }
  #   0.3: { data.partition.alpha: 0.3 }
